"""What ranks can share of a layer: refused by name before anything is built or started."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from caramba.config.attention import AttentionLayerConfig
from caramba.config.layer import AttentionDims, DropoutLayerConfig, SwiGLULayerConfig
from caramba.config.memory_bank import MemoryBankLayerConfig
from caramba.config.model import ModelSpec
from caramba.config.node import NodeConfig, is_own
from caramba.config.topology import TopologyConfig
from caramba.errors import ConfigError


def check_layers(spec: ModelSpec, n_ranks: int, *, split_sequence: bool, path: str = "model") -> None:
    """Refuse a model whose layers `n_ranks` cannot share.

    Raises:
        ConfigError: naming the heads, the features or the dropout, and the layer.
    """
    for where, layer in _layers(spec.topology, f"{path}.topology"):
        try:
            check_layer(layer, n_ranks, split_sequence=split_sequence)
        except ConfigError as error:
            raise ConfigError(f"{error} ({where})") from None


def check_layer(layer: NodeConfig, n_ranks: int, *, split_sequence: bool) -> None:
    """Refuse a layer that `n_ranks` cannot share.

    Raises:
        ConfigError: heads or features that they cannot share equally, dropout of a rank's own tokens, or a layer that
            is not caramba's.
    """
    if is_own(type(layer)):
        raise ConfigError(
            f"tensor parallel: there is no plan for a {layer.type}, a layer of your own; use parallel=ddp or fsdp2"
        )
    if isinstance(layer, MemoryBankLayerConfig):
        raise ConfigError(
            "tensor parallel: there is no plan for a MemoryBankLayer; use parallel=ddp or fsdp2"
        )
    if isinstance(layer, AttentionLayerConfig):
        dims_of_rank(layer.dims(), n_ranks, layer.is_latent)
    elif isinstance(layer, SwiGLULayerConfig):
        check_features(layer.d_ff, n_ranks)
    elif isinstance(layer, DropoutLayerConfig) and split_sequence:
        check_dropout(layer.p, n_ranks)


def check_features(d_ff: int, n_ranks: int) -> None:
    """Refuse features of a feed-forward network that `n_ranks` cannot share equally."""
    if d_ff % n_ranks:
        raise ConfigError(
            f"tensor parallel: {n_ranks} ranks cannot share d_ff={d_ff} features; use a multiple of {n_ranks}, or "
            "fewer ranks"
        )


def check_dropout(p: float, n_ranks: int) -> None:
    """Refuse dropout of a rank's own tokens: ranks are seeded alike."""
    if p > 0:
        raise ConfigError(
            f"tensor parallel: with sequence_parallel a DropoutLayer with p={p:g} would drop the same features "
            f"of other tokens on each of {n_ranks} ranks; use p=0, or sequence_parallel=false"
        )


def _layers(node: NodeConfig, path: str) -> Iterator[tuple[str, NodeConfig]]:
    if not isinstance(node, TopologyConfig):
        yield path, node
        return
    for index, child in enumerate(node.layers):
        yield from _layers(child, f"{path}.layers[{index}]")


def dims_of_rank(dims: AttentionDims, n_ranks: int, is_latent: bool) -> AttentionDims:
    """Return the widths of the heads of one rank.

    Raises:
        ConfigError: heads that the ranks cannot share equally.
    """
    heads, kv_heads = dims.n_heads, dims.n_kv_heads
    has_own_keys = not is_latent or dims.first_tokens > 0
    for name, count in (
        ("n_heads", heads),
        *([("n_kv_heads", kv_heads)] if has_own_keys and kv_heads > 1 else []),
    ):
        if count % n_ranks:
            divisors = [n for n in range(2, count + 1) if count % n == 0]
            fix = f"one of {', '.join(map(str, divisors))}" if divisors else "one rank"
            raise ConfigError(
                f"tensor parallel: {n_ranks} ranks cannot share {name}={count} heads; use {fix}"
            )
    own = kv_heads // n_ranks if kv_heads > 1 and has_own_keys else kv_heads

    def share(streams: Any) -> Any:
        return tuple((name, own if n == kv_heads else n, width) for name, n, width in streams)

    return replace(
        dims,
        n_heads=heads // n_ranks,
        n_kv_heads=own,
        streams=dims.streams if is_latent else share(dims.streams),
        first_streams=share(dims.first_streams),
    )
