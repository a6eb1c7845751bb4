"""Pass `absorb_latent`: one kernel for the absorbed queries of a latent layer's decode step, and one for its values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from caramba.cache import DeviceContext, LayerCache
from caramba.cache.view import CacheView
from caramba.layer.latent import LatentProjection
from caramba.layer.projection import Queries
from caramba.layer.score import HALF_PRECISION, Null
from caramba.lower.fuse_linears import FusedLatent
from caramba.lower.replaced import Replaced, replace_each
from caramba.ops import has_kernel
from caramba.ops.absorbed_step import absorbed_queries, absorbed_step
from caramba.ops.dba_append import dba_append
from caramba.ops.latent_queries import has_narrow_queries
from caramba.ops.small_batch_linear import per_head_linear

KERNELS = ("absorbed_queries", "dba_decode_up", "per_head_linear")


class AbsorbedLatent(LatentProjection):
    """A latent projection whose decode step is as few kernels as the device has.

    They replace per-head products and passes that rotate, concatenate and reorder.
    """

    def takes_step(self, x: Tensor) -> bool:
        """True if one kernel computes the absorbed queries of a step."""
        maps = (self.q_sem_map, self.q_geo_map)
        return (
            self.gate is None
            and self.temperature is None
            and self.first is None
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled(x.device.type)
            and all(type(one) is nn.Parameter and one.dtype == x.dtype for one in maps)
            and has_narrow_queries(x.dtype, self.query_dim, self.dims.rope)
            and has_kernel("absorbed_queries", self.q_sem_map)
        )

    def step(self, x: Tensor, ctx: DeviceContext, cache: LayerCache, cos: Tensor, sin: Tensor) -> Queries:
        """Store a step's latent and geometric key; return the absorbed queries."""
        # The kernels read views of a fused product without copying them.
        linears = self.by_one_product(x) if isinstance(self, FusedLatent) else self.linears(x, x)
        q, c, k_geo = linears
        q, c, k_geo = q.unflatten(-1, (self.dims.n_heads, -1)), c[:, None], k_geo[:, None]
        maps = self.q_sem_map, self.q_geo_map
        if has_kernel("absorbed_step", q):
            q = absorbed_step(q, *maps, cos, sin, self.scale, c, k_geo, cache.allocations, ctx.places)
        else:
            dba_append((c, k_geo), cache.allocations, ctx.places, cos, sin, cache.names.index("k_geo"))
            q = absorbed_queries(q, *maps, cos, sin, self.scale)
        q_sem, q_geo = q.transpose(1, 2).split((self.dims.v, self.dims.rope), dim=-1)
        return q_sem, q_geo

    def attend_cache(self, q: Queries, keys: CacheView, window: int | None, null: Null = None) -> Tensor:
        """Attend in the absorbed form, and map values by a kernel in 16 bits."""
        if self.null_c is None and self._maps_by("dba_decode_up", q[0]):
            return keys.attend_up(*q, ("c", "k_geo"), self.v_up, window=window)
        read = self.read_cache(q, keys, window)
        if self._maps_by("per_head_linear", read):
            return per_head_linear(read.transpose(1, 2), self.v_up).transpose(1, 2)
        return self.map_values(read)

    def _maps_by(self, op: str, x: Tensor) -> bool:
        is_plain = type(self.v_up) is nn.Parameter and x.dtype in HALF_PRECISION
        return is_plain and not torch.is_grad_enabled() and has_kernel(op, x)


def absorb_latent(model: nn.Module, *, is_compiled: bool) -> list[Replaced]:
    """Lower latent projections on devices with one of the kernels; return them."""
    return replace_each(
        model,
        LatentProjection,
        AbsorbedLatent,
        lambda module: any(has_kernel(op, module.q_sem_map) for op in KERNELS),
    )
