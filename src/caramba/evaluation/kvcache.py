"""Bytes of the key/value caches of teacher and student, counted from the tensors that hold them."""

from __future__ import annotations

import torch

from caramba.config.estimate import model_cost
from caramba.config.verify import KVCacheVerifyConfig
from caramba.infer import prefill
from caramba.model import Model
from caramba.result import Check


def kvcache(teacher: Model, student: Model, config: KVCacheVerifyConfig) -> tuple[Check, ...]:
    """Fill a cache of exactly `config.tokens` tokens with each model and count its buffers.

    `plan_difference` is |counted - planned| bytes per token of the student and has to be 0, the plan being what
    `caramba compile` prints.
    """
    theirs, _ = bytes_per_token(teacher, config)
    ours, layers = bytes_per_token(student, config)
    planned = float(model_cost(student.spec).kv_bytes_per_token(config.kind))
    checks = (
        Check("bytes_per_token", ours, config.max_bytes_per_token, "bytes"),
        Check("teacher_bytes_per_token", theirs, None, "bytes"),
        Check("ratio", theirs / ours, config.min_ratio, "ratio", is_minimum=True),
        Check("plan_difference", abs(ours - planned), 0.0, "bytes"),
    )
    each = [Check(f"bytes_per_token_layer{index}", size, None, "bytes") for index, size in enumerate(layers)]
    return (*checks, *each)


@torch.inference_mode()
def bytes_per_token(model: Model, config: KVCacheVerifyConfig) -> tuple[float, tuple[float, ...]]:
    """Return the bytes that a token takes in all buffers together, and in those of each attention application.

    Of a quantised cache that is what a token takes for good; its 16-bit tail does not grow with the sequence.
    """
    device = model.embedder.token.weight.device
    tokens = torch.arange(config.tokens, device=device).remainder(model.spec.embedder.vocab_size)[None]
    context = model.new_context(1, config.tokens, config.kind, static=True)
    prefill(model, tokens, context)
    layers = tuple(float(cache.bytes_per_token) for cache in context.caches)
    return float(context.bytes_per_token), layers
