"""What an attention layer costs, by its schema: weights, score and value work, cache, and what backward keeps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from caramba.config.attention_dims import (
    FUSED_WIDEST,
    PART_NARROWEST,
    PART_WIDEST,
    AttentionMode,
    align_width,
)
from caramba.config.attention_weights import COPIED, first_tokens_shapes
from caramba.config.cost import AttentionWork, Cost, Width, expect_width, layer_cost

if TYPE_CHECKING:
    from caramba.config.attention import AttentionLayerConfig


def attention_cost(config: AttentionLayerConfig, width: Width) -> Cost:
    """Check the width and count.

    The latent layout decodes in its absorbed form, and a forward over a sequence takes the expanded one where
    that is less work; the maps cost the same in both, once per token. The expanded form maps the null latent too,
    once per forward.
    """
    expect_width(width, config.d_model, "d_model")
    dims = config.dims()
    is_expanded = _trains_expanded(config)
    work = AttentionWork(
        dims.n_heads * (dims.qk + dims.v),
        config.local_window,
        int(config.null_attn),
        dims.n_heads * (2 * config.query_dim + dims.rope) if is_expanded else None,
        forward_weights=2 * dims.n_heads * dims.v * config.query_dim * (is_expanded and config.null_attn),
    )
    cost = layer_cost(
        _label(config),
        config.type,
        width,
        width,
        config.parameter_shapes(),
        _saved(config),
        work,
        dims.streams,
        COPIED if config.is_latent else (),
        _spared(config) if uses_split_keys(config) else 0,
    )
    return _with_first_tokens(config, cost, work) if dims.first_tokens else cost


def _with_first_tokens(config: AttentionLayerConfig, cost: Cost, work: AttentionWork) -> Cost:
    """Add what first tokens take: features that carry their part of the softmax, projections, scores and values of
    their own, and the query's product with the mean of keys."""
    dims, heads, width = config.dims(), config.n_heads, config.query_dim
    once = sum(math.prod(shape) for shape in first_tokens_shapes(config).values() if len(shape) > 1)
    expanded = heads * (align_width(width + dims.rope + 2) + align_width(width + 1))
    work = replace(
        work,
        width=2 * heads * align_width(dims.qk + 2),
        forward_width=expanded if _trains_expanded(config) else None,
        first=dims.first_tokens,
        first_width=2 * heads * width,
        first_weights=once,
    )
    return replace(
        cost,
        matmul_params_used=cost.matmul_params_used - once + heads * width,
        attention=(work,),
        kv_first=((dims.first_tokens, dims.first_streams),),
    )


def _saved(config: AttentionLayerConfig) -> int:
    """Elements kept for backward: input, q, k, v, output and log-sum-exp, inputs of elementwise steps.

    As the fp32 score op keeps them: keys and values repeated to all query heads, q, k, v and output of one
    width, the output once more in the order that `out` reads.
    """
    dims, heads = config.dims(), config.n_heads
    queries, keys = heads * dims.qk, dims.n_kv_heads * dims.qk
    if config.is_latent:
        return _saved_latent(config)
    norms = 2 * (queries + keys) + heads + dims.n_kv_heads if config.qk_norm else 0
    scaled = queries * (config.decoupled_gate + config.learned_temperature)
    return config.d_model + 4 * heads * max(dims.qk, dims.v) + heads * dims.v + heads + norms + scaled


def _saved_latent(config: AttentionLayerConfig) -> int:
    """As `_saved`: expanded, the latent with k_geo and q, k, v and output as wide as the keys of every head;
    absorbed, the one key that is the value too, queries and output as wide, and what the maps read (of the queries
    a view, which keeps all of their parts). A norm keeps the latent before it. First tokens add their queries, the
    semantic ones once more, their scores and probabilities, what they give, and features of the others.
    """
    dims, heads, width = config.dims(), config.n_heads, config.n_heads * config.query_dim
    projected = config.d_model + width + heads * dims.rope * config.decoupled_gate
    scaled = (width + heads * dims.rope) * config.learned_temperature
    keys, first = config.query_dim + dims.rope if _trains_expanded(config) else dims.qk, 0
    if dims.first_tokens:
        keys = align_width(keys + 2)
        first = (3 if _trains_expanded(config) else 4) * width + 2 * heads * (dims.first_tokens + 1)
        first += width * config.learned_temperature
    if _trains_expanded(config):
        form = dims.v + dims.rope + 4 * heads * keys
    else:
        form = width + heads * dims.rope + keys + 2 * heads * keys + heads * dims.v
    norm = dims.v + 1 if config.mla else 0
    return projected + scaled + form + heads + width + first + norm


def uses_split_keys(config: AttentionLayerConfig) -> bool:
    """Whether training uses the kernel with split keys, in 16 bits on a device that has it.

    It takes keys wider than fused backends do, of its tiles' widths; with a window some forwards may not use it.
    """
    if not config.is_latent or config.null_attn or config.exact_first_tokens or config.dropout > 0:
        return False
    dims = config.dims()
    sem = config.query_dim if _trains_expanded(config) else dims.v
    widths = {"sem": sem, "geo": dims.rope, "value": sem}
    return (
        sem + dims.rope > FUSED_WIDEST
        and config.local_window is None
        and all(
            PART_NARROWEST <= width <= PART_WIDEST[part] and width & (width - 1) == 0
            for part, width in widths.items()
        )
    )


def _spared(config: AttentionLayerConfig) -> int:
    """Elements of `_saved_latent` that are not kept where keys stay in two parts: expanded, queries alone are as wide
    as keys, and values and output as the latent's part; absorbed, the output is as wide as the value. One geometric key
    after RoPE is kept besides, which joined keys copy.
    """
    dims, heads = config.dims(), config.n_heads
    turned = dims.rope * config.rope_enabled
    if _trains_expanded(config):
        return heads * (config.query_dim + 3 * dims.rope) - turned
    return heads * dims.qk - turned


def _trains_expanded(config: AttentionLayerConfig) -> bool:
    """Whether a forward over a whole sequence gives every head its own keys and values: a latent wider than a
    head makes those the smaller ones."""
    return config.is_latent and config.dims().v > config.query_dim


def _label(config: AttentionLayerConfig) -> str:
    dims = config.dims()
    is_plain = config.is_latent or dims.n_kv_heads == dims.n_heads
    heads = f"{dims.n_heads}" if is_plain else f"{dims.n_heads}:{dims.n_kv_heads}"
    if config.mode is not AttentionMode.DECOUPLED:
        return f"{config.mode}, {heads} heads x {dims.qk}"
    names = {"k_sem": "sem", "k_geo": "geo", "c": "latent"}
    widths = " ".join(f"{names.get(name, name)} {count * width}" for name, count, width in dims.streams)
    first = f", first {dims.first_tokens} exact" if dims.first_tokens else ""
    return f"{config.mode} {config.layout}, {heads} heads, {widths}{first}"
