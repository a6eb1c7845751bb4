"""Pass `latent_keys`: larger products for the latent and the keys of a latent layer's training step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from caramba.layer.latent import LatentProjection
from caramba.layer.score import HALF_PRECISION
from caramba.lower.replaced import Replaced, is_unmodified, replace_each


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
