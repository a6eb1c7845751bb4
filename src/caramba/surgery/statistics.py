"""What surgery knows of an attention layer: second moments before RoPE and the mean rotation, measured or from weights.

Everything in the algebra follows from these; no activation is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from caramba.layer import AttentionLayer, StandardProjection
from caramba.layer.projection import split_heads


@dataclass(frozen=True)
class LayerStatistics:
    """Moments of one attention layer's projections: H query heads, K key/value heads, P = D / 2 pairs.

    Attributes:
        moment: E[y y^T] of y = [k; v], each head by head, [K (D + Dv), K (D + Dv)] float64.
        mean: E[y], [K (D + Dv)] float64.
        queries: E[q q^T] of each query head, [H, D, D] float64.
        rotation: the attention-weighted mean rotation of each key/value head and pair, [K, P] complex128.
    """

    moment: Tensor
    mean: Tensor
    queries: Tensor
    rotation: Tensor

    @property
    def covariance(self) -> Tensor:
        """E[(y - E y)(y - E y)^T]."""
        return self.moment - torch.outer(self.mean, self.mean)

    def to(self, device: torch.device | str) -> LayerStatistics:
        """Return the same on `device`."""
        return LayerStatistics(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def standard_projection(layer: AttentionLayer) -> StandardProjection:
    """Return a teacher layer's projection, which the checks before any work have found to be a standard one."""
    projection = layer.projection
    if not isinstance(projection, StandardProjection) or projection.rope is None:
        raise TypeError(f"surgery reads standard attention with RoPE, got {type(projection).__name__}")
    return projection


def project_without_rope(layer: AttentionLayer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [B, H, T, D], k [B, K, T, D], v [B, K, T, Dv] before RoPE and scale."""
    projection, dims = standard_projection(layer), layer.dims
    return (
        split_heads(projection.q(x), dims.n_heads),
        split_heads(projection.k(x), dims.n_kv_heads),
        split_heads(projection.v(x), dims.n_kv_heads),
    )


def weight_statistics(layer: AttentionLayer) -> LayerStatistics:
    """Return the statistics that white, centred features would give: moments from weights and biases alone.

    Biases are the means of queries, keys and values then. The rotation is the identity: no attention is known.
    """
    projection, dims = standard_projection(layer), layer.dims
    joint = torch.cat((projection.k.weight, projection.v.weight)).double()
    mean = torch.cat((bias_of(projection.k), bias_of(projection.v)))
    queries = projection.q.weight.double().unflatten(0, (dims.n_heads, dims.qk))
    query_mean = bias_of(projection.q).unflatten(0, (dims.n_heads, dims.qk))
    rotation = torch.ones(dims.n_kv_heads, dims.qk // 2, dtype=torch.complex128, device=joint.device)
    return LayerStatistics(
        joint @ joint.T + torch.outer(mean, mean),
        mean,
        queries @ queries.transpose(1, 2) + query_mean[:, :, None] * query_mean[:, None, :],
        rotation,
    )


def bias_of(linear: nn.Linear) -> Tensor:
    """Return a layer's bias in float64, zeros where it has none."""
    return (
        linear.weight.new_zeros(len(linear.weight)).double() if linear.bias is None else linear.bias.double()
    )


def pack(statistics: Sequence[LayerStatistics]) -> dict[str, Tensor]:
    """Return the statistics as named real tensors, for a file."""
    tensors: dict[str, Tensor] = {}
    for index, item in enumerate(statistics):
        for field in fields(item):
            value = getattr(item, field.name)
            tensors[f"{index}.{field.name}"] = torch.view_as_real(value) if value.is_complex() else value
    return tensors


def unpack(tensors: dict[str, Tensor]) -> list[LayerStatistics]:
    """Return what `pack` was given."""
    names = [field.name for field in fields(LayerStatistics)]
    layers = range(len(tensors) // len(names))
    found = []
    for index in layers:
        values = {name: tensors[f"{index}.{name}"] for name in names}
        # A tensor in a mapped file begins at any multiple of 8 bytes, and complex128 arithmetic reads 16 at a time.
        values["rotation"] = torch.view_as_complex(values["rotation"].clone())
        found.append(LayerStatistics(**values))
    return found
