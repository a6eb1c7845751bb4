"""The op `caramba::absorbed_queries`: queries of latent attention mapped into the latent space, for a decode step."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import call_op, caramba_op, has_kernel
from caramba.ops.first_order import refuse_gradients
from caramba.ops.latent_queries import check_queries, has_narrow_queries, reference_latent_queries
from caramba.ops.per_head_linear import reference_per_head_linear


def absorbed_queries(
    q: Tensor, sem_map: Tensor, geo_map: Tensor, cos: Tensor, sin: Tensor, scale: float
) -> Tensor:
    """Return [(scale q_h) A_h, scale RoPE(q_h G_h)] for every head h: `latent_queries`, mapped into the latent.

    Sums and angles are in at least fp32; scaled queries round to q's dtype before their product, as those of
    `latent_queries` do, and so do the maps. There are no gradients.

    Shape: q [B, T, H, D] of any strides, sem_map [H, D, R], geo_map [H, D, G], cos and sin [1, T, G/2] or
    [B, 1, T, G/2]; returns [B, T, H, R + G], contiguous, in q's dtype.

    Raises:
        ConfigError: shapes, dtypes or devices that do not fit, or gradients that are wanted.
    """
    check_queries("absorbed_queries", q, geo_map, cos, sin)
    fits = sem_map.dim() == 3 and sem_map.shape[:2] == q.shape[2:] and sem_map.is_floating_point()
    if not fits or sem_map.device != q.device:
        raise ConfigError(
            f"absorbed_queries: sem_map is {sem_map.dtype} {tuple(sem_map.shape)} on {sem_map.device}, expected "
            f"floating [{q.shape[2]}, {q.shape[3]}, R] on {q.device}"
        )
    refuse_gradients("absorbed_queries", q, sem_map, geo_map)
    if has_kernel("absorbed_queries", q) and not has_narrow_queries(q.dtype, q.shape[-1], geo_map.shape[-1]):
        return reference_absorbed_queries(q, sem_map, geo_map, cos, sin, scale)
    return call_op("absorbed_queries", q, sem_map, geo_map, cos, sin, scale)


@caramba_op(
    "absorbed_queries",
    fake=lambda q, sem_map, geo_map, *_: q.new_empty((*q.shape[:-1], sem_map.shape[-1] + geo_map.shape[-1])),
)
def reference_absorbed_queries(
    q: Tensor, sem_map: Tensor, geo_map: Tensor, cos: Tensor, sin: Tensor, scale: float
) -> Tensor:
    """Compute the op in plain PyTorch."""
    sem, geo = reference_latent_queries(q, geo_map, cos, sin, scale).split(
        (q.shape[-1], geo_map.shape[-1]), dim=-1
    )
    return torch.cat((reference_per_head_linear(sem, sem_map), geo), dim=-1)
