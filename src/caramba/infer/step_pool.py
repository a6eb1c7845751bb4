"""Contexts and captured steps that generations of one length bucket share, so that only the first of them captures."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from caramba.cache import TAIL_TOKENS, Context
from caramba.config.cache_policy import step_capacity
from caramba.config.generate import GenerateConfig
from caramba.config.kvcache import EXACT_KINDS, KVCacheKind
from caramba.infer.device_steps import (
    DecodeForm,
    DeviceSteps,
    HostSteps,
    Steps,
    choose_steps,
    step_refusal,
)
from caramba.infer.row import Row
from caramba.infer.step import StepState
from caramba.model import Model

KEPT = 2
"""Buckets whose caches stay allocated between calls; the one used longest ago goes first."""
BAKED = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "decode_local_window",
    "compiled",
)
"""Keys of a generation that a captured step holds as constants."""


@dataclass
class Prepared:
    """An empty context, the state of its rows, and the steps that run on both."""

    ctx: Context
    state: StepState
    steps: Steps
    form: DecodeForm
    not_compiled: str | None


class StepPool:
    """Prepares generations. Those that run on the device by themselves get a context of their length's bucket, and the
    next of that bucket gets it again, emptied, with what was captured or compiled for it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[Any, ...], Prepared] = OrderedDict()

    def prepare(
        self,
        model: Model,
        rows: Sequence[Row],
        config: GenerateConfig,
        kind: KVCacheKind,
        n_tokens: int,
        limit: int | None,
    ) -> Prepared:
        """Return what a generation of `n_tokens` a row, prompt and new text, runs on; `limit` is the most there is."""
        device = model.embedder.token.weight.device
        is_quantised = kind not in EXACT_KINDS
        # A quantised cache of so few tokens stays in 16 bits, in a bucket it would not.
        is_short = is_quantised and n_tokens <= 2 * TAIL_TOKENS
        if not config.compiled or is_short or (config.compiled == "graph" and device.type != "cuda"):
            return _made(model, rows, config, kind, n_tokens, 0)
        capacity = step_capacity(n_tokens, limit)
        key = (identity_of(model), len(rows), capacity, kind, *(getattr(config, name) for name in BAKED))
        found = self._kept.pop(key, None)
        if found is None:
            if is_quantised and not _takes_steps(model, kind):
                return _made(model, rows, config, kind, n_tokens, 0)
            while len(self._kept) >= KEPT:
                self._kept.popitem(last=False)
            found = _made(model, rows, config, kind, capacity, capacity)
            if not isinstance(found.steps, DeviceSteps):
                # A bucket may reach beyond lengths that steps on the device can serve, where the text does not.
                return _made(model, rows, config, kind, n_tokens, 0)
        else:
            found.ctx.truncate(0)
            found.state.refill(rows)
        self._kept[key] = found
        return found


def _takes_steps(model: Model, kind: KVCacheKind) -> bool:
    """Whether steps on the device run on a cache of this format, which one of a token tells."""
    return step_refusal(model, model.new_context(1, 1, kind, static=True)) is None


def _made(
    model: Model, rows: Sequence[Row], config: GenerateConfig, kind: KVCacheKind, capacity: int, width: int
) -> Prepared:
    device = model.embedder.token.weight.device
    ctx = model.new_context(len(rows), capacity, kind, static=True)
    state = StepState.of(rows, config, model.spec.embedder.vocab_size, device, width=width)
    return Prepared(ctx, state, *choose_steps(HostSteps(model, state, ctx, config)))


def identity_of(model: Model) -> tuple[Any, ...]:
    """Return what changes when the weights that a graph reads move to other memory."""
    weights = tuple(model.parameters())
    return tuple(zip(map(id, weights), addresses(weights), strict=True))


def addresses(weights: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return where weights lie, 0 for those that are no plain tensors."""
    plain = (torch.Tensor, torch.nn.Parameter)
    return tuple(weight.data_ptr() if type(weight) in plain else 0 for weight in weights)
