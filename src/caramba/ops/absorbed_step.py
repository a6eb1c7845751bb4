"""Ops of a decode step with an absorbed latent: its queries, and what it adds to the cache."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import call_op, caramba_op, has_kernel, refuse_gradients
from caramba.ops.dba_append import check_dba_append, dba_append
from caramba.ops.latent_queries import HALF, check_queries, has_narrow_queries, reference_latent_queries
from caramba.ops.small_batch_linear import reference_per_head_linear


def absorbed_queries(q: Tensor, sem_map: Tensor, geo_map: Tensor, cos: Tensor, sin: Tensor, scale: float) -> Tensor:
    """Return [(scale q_h) A_h, scale RoPE(q_h G_h)] for every head h: `latent_queries`, mapped into the latent.

    Sums and angles are in at least fp32; scaled queries round to q's dtype before their product, as those of
    `latent_queries` do, and so do the maps. There are no gradients.

    Shape: q [B, T, H, D] of any strides, sem_map [H, D, R], geo_map [H, D, G], cos and sin [1, T, G/2] or
    [B, 1, T, G/2]; returns [B, T, H, R + G], contiguous, in q's dtype.

    Raises:
        ConfigError: shapes, dtypes or devices that do not fit, or gradients that are wanted.
    """
    check_queries("absorbed_queries", q, geo_map, cos, sin)
    _check_map("absorbed_queries", q, sem_map)
    refuse_gradients("absorbed_queries", q, sem_map, geo_map)
    if has_kernel("absorbed_queries", q) and not has_narrow_queries(q.dtype, q.shape[-1], geo_map.shape[-1]):
        return reference_absorbed_queries(q, sem_map, geo_map, cos, sin, scale)
    return call_op("absorbed_queries", q, sem_map, geo_map, cos, sin, scale)


def _check_map(op: str, q: Tensor, sem_map: Tensor) -> None:
    fits = sem_map.dim() == 3 and sem_map.shape[:2] == q.shape[2:] and sem_map.is_floating_point()
    if not fits or sem_map.device != q.device:
        raise ConfigError(
            f"{op}: sem_map is {sem_map.dtype} {tuple(sem_map.shape)} on {sem_map.device}, expected floating "
            f"[{q.shape[2]}, {q.shape[3]}, R] on {q.device}"
        )


@caramba_op(
    "absorbed_queries",
    fake=lambda q, sem_map, geo_map, *_: q.new_empty((*q.shape[:-1], sem_map.shape[-1] + geo_map.shape[-1])),
)
def reference_absorbed_queries(
    q: Tensor, sem_map: Tensor, geo_map: Tensor, cos: Tensor, sin: Tensor, scale: float
) -> Tensor:
    """Compute the op in plain PyTorch."""
    sem, geo = reference_latent_queries(q, geo_map, cos, sin, scale).split((q.shape[-1], geo_map.shape[-1]), dim=-1)
    return torch.cat((reference_per_head_linear(sem, sem_map), geo), dim=-1)


def absorbed_step(
    q: Tensor,
    sem_map: Tensor,
    geo_map: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    c: Tensor,
    k_geo: Tensor,
    buffers: Sequence[Tensor],
    lengths: Tensor,
) -> Tensor:
    """Return `absorbed_queries`, and append c and the rotated k_geo at `lengths` as `dba_append` does.

    There are no gradients.

    Shape: q [B, T, H, D], sem_map [H, D, R], geo_map [H, D, G], cos and sin [1, T, G/2] or [B, 1, T, G/2],
    c [B, 1, T, R], k_geo [B, 1, T, G], buffers [B, 1, S, R + G] alone or [B, 1, S, R] and [B, 1, S, G], lengths
    int32 [B]; returns [B, T, H, R + G], contiguous, in q's dtype.

    Raises:
        ConfigError: shapes, dtypes, strides or devices that do not fit, or gradients that are wanted.
    """
    given = (q, sem_map, geo_map, cos, sin, scale, c, k_geo, list(buffers), lengths)
    _check(*given)
    refuse_gradients("absorbed_step", q, sem_map, geo_map, c, k_geo)
    if has_kernel("absorbed_step", q) and not _has_narrow(q, c, k_geo, geo_map, buffers):
        return reference_absorbed_step(*given)
    return call_op("absorbed_step", *given)


def _has_narrow(q: Tensor, c: Tensor, k_geo: Tensor, geo_map: Tensor, buffers: Sequence[Tensor]) -> bool:
    narrow = (*HALF, torch.float32)
    return (
        has_narrow_queries(q.dtype, q.shape[-1], geo_map.shape[-1])
        and c.dtype == k_geo.dtype == q.dtype
        and all(x.dtype in narrow for x in buffers)
    )


def _check(*given: Any) -> None:
    q, sem_map, geo_map, cos, sin, _, c, k_geo, buffers, lengths = given
    check_queries("absorbed_step", q, geo_map, cos, sin)
    _check_map("absorbed_step", q, sem_map)
    rows = q.shape[0], 1, q.shape[1]
    shapes = (*rows, sem_map.shape[2]), (*rows, geo_map.shape[2])
    if (tuple(c.shape), tuple(k_geo.shape)) != shapes or not c.device == k_geo.device == q.device:
        raise ConfigError(
            f"absorbed_step: c is {tuple(c.shape)} on {c.device} and k_geo {tuple(k_geo.shape)} on {k_geo.device}, "
            f"expected {shapes[0]} and {shapes[1]} on {q.device}"
        )
    check_dba_append([c, k_geo], buffers, lengths, cos, sin, 1)


def _fake(*given: Any) -> Tensor:
    _check(*given)
    q, sem_map, geo_map = given[:3]
    return q.new_empty((*q.shape[:-1], sem_map.shape[-1] + geo_map.shape[-1]))


@caramba_op("absorbed_step", fake=_fake, mutates=("buffers",))
def reference_absorbed_step(
    q: Tensor,
    sem_map: Tensor,
    geo_map: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    c: Tensor,
    k_geo: Tensor,
    buffers: list[Tensor],
    lengths: Tensor,
) -> Tensor:
    """Compute the op by the two that it joins, each of which knows what its kernels take."""
    dba_append([c, k_geo], buffers, lengths, cos, sin, 1)
    return absorbed_queries(q, sem_map, geo_map, cos, sin, scale)
