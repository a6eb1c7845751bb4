"""The minimal decode loop: prefill a context, then one token at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from caramba.config.kvcache import KVCacheKind
from caramba.errors import ConfigError
from caramba.layer.score import unplanned_attention

if TYPE_CHECKING:
    from caramba.cache import Context
    from caramba.model import Model


@torch.inference_mode()
def prefill(model: Model, tokens: Tensor, ctx: Context, chunk: int | None = None) -> Tensor:
    """Run a prompt through the model and return the logits after its last token; only those are computed.

    `chunk` bounds the tokens per forward, and with them the memory of activations; the result is the same.

    Shape: tokens [B, T] int64 to [B, V].

    Raises:
        ConfigError: an empty prompt or a chunk below 1.
    """
    n_tokens = tokens.shape[1]
    size = n_tokens if chunk is None else chunk
    if n_tokens < 1 or size < 1:
        raise ConfigError(f"prefill: got {n_tokens} tokens and chunk={chunk}; both are at least 1")
    *firsts, last = tokens.split(size, dim=1)
    with unplanned_attention(tokens.device, tokens.shape[0] * min(size, n_tokens) * n_tokens):
        for part in firsts:
            model.hidden(part, ctx)
        return model.logits(model.hidden(last, ctx)[:, -1])


@torch.inference_mode()
def decode_step(model: Model, token: Tensor, ctx: Context) -> Tensor:
    """Run one token per sequence and return the logits of the next.

    Shape: token [B] or [B, 1] int64 to [B, V].
    """
    with unplanned_attention(token.device, token.numel() * (ctx.position + 1)):
        return model.logits(model.hidden(token.reshape(-1, 1), ctx)[:, -1])


@torch.inference_mode()
def greedy(model: Model, tokens: Tensor, max_new_tokens: int, kind: KVCacheKind = KVCacheKind.FP32) -> Tensor:
    """Extend each prompt by its most likely tokens, decoding with a cache of the given kind, in eval mode.

    Shape: tokens [B, T] int64 to [B, T + max_new_tokens].
    """
    if max_new_tokens < 0:
        raise ConfigError(f"greedy: got max_new_tokens={max_new_tokens}, expected 0 or more")
    if max_new_tokens == 0:
        return tokens
    batch_size, n_tokens = tokens.shape
    was_training = model.training
    model.eval()
    try:
        # The last new token is never run, so the cache need not hold it.
        ctx = model.new_context(batch_size, n_tokens + max_new_tokens - 1, kind, static=True)
        new = [prefill(model, tokens, ctx).argmax(-1)]
        while len(new) < max_new_tokens:
            new.append(decode_step(model, new[-1], ctx).argmax(-1))
    finally:
        model.train(was_training)
    return torch.cat((tokens, torch.stack(new, dim=1)), dim=1)
