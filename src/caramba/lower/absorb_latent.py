"""Passes over latent layers: absorbed queries and values of decode steps, fused keys and queries in training."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from caramba.cache import DeviceContext, LayerCache
from caramba.cache.view import CacheView
from caramba.layer.latent import LatentProjection
from caramba.layer.projection import Angles, Queries
from caramba.layer.score import HALF_PRECISION, Null
from caramba.lower.fuse_linears import FusedLatent
from caramba.lower.lowering import Replaced, is_unmodified, replace_each
from caramba.lower.norm_linear import PreNorm
from caramba.ops import has_kernel
from caramba.ops.absorbed_step import absorbed_queries, absorbed_step
from caramba.ops.dba_append import dba_append
from caramba.ops.latent_queries import has_narrow_queries, latent_queries
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


class FusedLatentKeys(LatentProjection):
    """A latent projection whose latent and geometric key are one product while it trains, and all heads' keys another.

    The latent and the geometric key alone are too narrow to keep a GPU busy, and each reads all of x.
    """

    def linears(self, x: Tensor, asking: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not torch.is_grad_enabled():
            return super().linears(x, asking)
        q = self.q(asking)
        weight = torch.cat((self.c.weight, self.k_geo.weight))
        bias = None
        if self.c.bias is not None:
            zeros = self.c.bias.new_zeros(self.dims.rope)
            bias = torch.cat((self.c.bias, zeros if self.k_geo.bias is None else self.k_geo.bias))
        c, k_geo = F.linear(x, weight, bias).split((self.dims.v, self.dims.rope), -1)
        return q, c if self.c_norm is None else self.c_norm(c), k_geo

    def keys_values(self, streams: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        c, k_geo = streams["c"].squeeze(1), streams["k_geo"].squeeze(1)
        is_cheaper = c.is_cuda and c.dtype in HALF_PRECISION and self.dims.rope <= self.query_dim
        if not (torch.is_grad_enabled() and is_cheaper):
            return super().keys_values(streams)
        v = self.project_values(c).transpose(1, 2)
        keys = self.keys_by_one_product(c, k_geo).unflatten(-1, (self.dims.n_heads, -1))
        return keys.transpose(1, 2), v

    def keys_by_one_product(self, c: Tensor, k_geo: Tensor) -> Tensor:
        """Return every head's [A_h c, k_geo], [B, S, H*(D + Dgeo)], as [c, k_geo] times [[A_h, 0], [0, 1]].

        On GPUs that is cheaper than concatenating keys and splitting their gradients. Ones and zeros are exact in every
        dtype, so the geometric part is the same for all heads to the last bit.
        """
        heads, _, latent = self.q_sem_map.shape
        geo = self.dims.rope
        ones = torch.eye(geo, dtype=self.q_sem_map.dtype, device=c.device).expand(heads, -1, -1)
        weight = torch.cat((F.pad(self.q_sem_map, (0, geo)), F.pad(ones, (latent, 0))), dim=1)
        return F.linear(torch.cat((c, k_geo.to(c.dtype)), dim=-1), weight.flatten(0, 1))


def fuse_latent_keys(model: nn.Module, *, is_compiled: bool) -> list[Replaced]:
    """Lower latent projections whose `c` and `k_geo` are plain linear layers; return them."""
    return replace_each(
        model,
        LatentProjection,
        FusedLatentKeys,
        lambda module: is_unmodified(module.c, nn.Linear) and is_unmodified(module.k_geo, nn.Linear),
    )
