"""How attention runs while a generation lasts: queries in chunks where a mask would grow, a window if one is named."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from caramba.config.cache_policy import CacheKeys, q_chunk_for
from caramba.errors import ConfigError
from caramba.layer.attention import AttentionLayer
from caramba.layer.memory_bank import MemoryBankLayer
from caramba.model import Model


@contextlib.contextmanager
def planned(model: Model, config: CacheKeys, n_tokens: int) -> Iterator[dict[str, int | None]]:
    """Run a block with the attention that the decode plan sets for prompts of `n_tokens`, then restore it.

    `auto` sets `q_chunk` in layers that have none and build a mask (a window or null attention), whose memory is
    queries times keys; plain causal attention needs none. `fixed` sets it in all layers. Both leave every result as
    it is. Only `decode_local_window` changes results. The block gets what was set.

    Raises:
        ConfigError: a window for a layer that keeps its first tokens at full precision.
    """
    scores = [(layer, layer.score.q_chunk, layer.score.window) for _, layer in model.attention_layers()]
    window = config.decode_local_window
    if window is not None and any(layer.dims.first_tokens for layer, _, _ in scores):
        raise ConfigError(
            f"decode_local_window={window}: this model has exact_first_tokens, which a window would hide; leave it out"
        )
    if window is not None and any(isinstance(layer, MemoryBankLayer) for layer, _, _ in scores):
        raise ConfigError(
            f"decode_local_window={window}: this model has memory slots, which are written for local_window; leave it "
            "out"
        )
    try:
        for layer, q_chunk, own in scores:
            layer.score.q_chunk = _q_chunk(layer, q_chunk, config, n_tokens)
            if window is not None:
                layer.score.window = window if own is None else min(own, window)
        yield {
            "q_chunk": min(
                (layer.score.q_chunk for layer, _, _ in scores if layer.score.q_chunk), default=None
            ),
            "local_window": window,
        }
    finally:
        for layer, q_chunk, own in scores:
            layer.score.q_chunk, layer.score.window = q_chunk, own


def _q_chunk(layer: AttentionLayer, own: int | None, config: CacheKeys, n_tokens: int) -> int | None:
    if config.decode_plan == "fixed":
        return config.decode_q_chunk
    has_mask = layer.config.null_attn or layer.score.window is not None
    if config.decode_plan == "none" or own is not None or not has_mask:
        return own
    return q_chunk_for(n_tokens)
