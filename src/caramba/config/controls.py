"""Controls of an upcycled student, derived from the schemas alone: a teacher with fewer key/value heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from math import gcd
from typing import Any

from caramba.config.attention import AttentionLayerConfig
from caramba.config.attention_dims import AttentionMode
from caramba.config.model import ModelSpec
from caramba.config.surgery import attention_configs
from caramba.config.topology import TopologyConfig
from caramba.errors import ConfigError


def map_attention(node: Any, change: Callable[[AttentionLayerConfig], AttentionLayerConfig]) -> Any:
    """Return the tree with every attention layer changed; the names of its weights stay."""
    if isinstance(node, AttentionLayerConfig):
        return change(node)
    if not isinstance(node, TopologyConfig):
        return node
    return node.model_copy(update={"layers": tuple(map_attention(child, change) for child in node.layers)})


def fewer_kv_heads(teacher: ModelSpec, elements: int) -> ModelSpec:
    """Return the teacher with fewer key/value heads, its cache closest to `elements` per token over all layers.

    Heads are divided by one number; of two equally close caches the larger is taken.

    Raises:
        ConfigError: the teacher has decoupled attention, or the nearest possible is the teacher itself.
    """
    layers = attention_configs(teacher.topology)
    unpooled = [
        layer.mode for layer in layers if layer.mode not in (AttentionMode.STANDARD, AttentionMode.GQA)
    ]
    if unpooled:
        raise ConfigError(
            f"control copy: pools the heads of standard or gqa attention, got a teacher with mode={unpooled[0]}; leave "
            "copy out of `controls`"
        )
    cached = sum(layer.dims().cached for layer in layers)
    most = reduce(gcd, (layer.dims().n_kv_heads for layer in layers))
    factors = [factor for factor in range(1, most + 1) if most % factor == 0]
    factor = min(factors, key=lambda item: abs(cached / item - elements))
    if factor == 1:
        raise ConfigError(
            f"control copy: {elements} cached elements per token are nearest to the teacher's own {cached}, so "
            f"no head is pooled; the next possible is {cached // factors[1] if len(factors) > 1 else 'none'}"
        )

    def pool_kv_heads(layer: AttentionLayerConfig) -> AttentionLayerConfig:
        dims = layer.dims()
        return AttentionLayerConfig.model_validate(
            {
                **layer.model_dump(mode="json"),
                "mode": "gqa",
                "head_dim": dims.qk,
                "n_kv_heads": dims.n_kv_heads // factor,
            }
        )

    return teacher.model_copy(update={"topology": map_attention(teacher.topology, pool_kv_heads)})
