"""Pass `latent_queries`: one kernel maps, rotates, scales and concatenates the queries of a latent layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from caramba.layer.latent import LatentProjection
from caramba.layer.projection import Angles
from caramba.lower.pre_norm import PreNorm
from caramba.lower.replaced import Replaced, replace_each
from caramba.ops import has_kernel
from caramba.ops.latent_queries import has_narrow_queries, latent_queries


class FusedLatentQueries(LatentProjection):
    """A latent projection that maps, rotates, scales and concatenates its queries by one kernel.

    In training, where it saves the most passes, and in small-batch steps, which are bound by launches.
    """

    def map_queries(self, x: Tensor, q: Tensor, angles: Angles, dtype: torch.dtype) -> Tensor:
        if (
            angles is not None
            and (torch.is_grad_enabled() or isinstance(x, PreNorm))
            and self.gate is None
            and self.temperature is None
            and has_narrow_queries(q.dtype, self.query_dim, self.dims.rope)
            and type(self.q_geo_map) is nn.Parameter
            and has_kernel("latent_queries", q)
        ):
            return latent_queries(q.transpose(1, 2), self.q_geo_map, *angles, self.scale).transpose(1, 2)
        return super().map_queries(x, q, angles, dtype)


def fuse_latent_queries(model: nn.Module, *, is_compiled: bool) -> list[Replaced]:
    """Lower latent projections on devices with the kernel; return them."""
    return replace_each(
        model,
        LatentProjection,
        FusedLatentQueries,
        lambda module: has_kernel("latent_queries", module.q_sem_map),
    )
