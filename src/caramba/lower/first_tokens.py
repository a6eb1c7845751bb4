"""Pass `first_tokens`: exact first tokens of whole training sequences by one kernel, from queries before RoPE."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from caramba.layer.attention import AttentionLayer
from caramba.layer.latent import FirstTokens, LatentProjection
from caramba.layer.projection import Angles
from caramba.lower.lowering import Replaced, has_hooks, replace_class
from caramba.ops import has_kernel
from caramba.ops.first_tokens import first_tokens, has_narrow_heads


class FusedFirstTokens(LatentProjection):
    """A latent projection whose first tokens read its scaled queries in place.

    No third part of the queries is rotated and concatenated, so that one kernel maps the other two (`latent_queries`).
    """

    def map_with_first(
        self,
        tokens: FirstTokens,
        x: Tensor,
        q: Tensor,
        angles: Angles,
        dtype: torch.dtype,
        offset: int | Tensor,
        rows: Tensor | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        is_whole = isinstance(offset, int) and offset == 0 and rows is None
        if (
            not (is_whole and torch.is_grad_enabled() and x.shape[1] >= tokens.n_tokens)
            or self.gate is not None
            or self.temperature is not None
            or tokens.rope is None
            or not has_narrow_heads(dtype, self.query_dim, tokens.n_tokens)
            or not has_kernel("first_tokens", q)
        ):
            return super().map_with_first(tokens, x, q, angles, dtype, offset, rows)
        return self.map_queries(x, q, angles, dtype), tokens.streams(x, 0, tokens.angles(x, 0))

    def read_first(
        self, tokens: FirstTokens, q: Tensor, streams: Mapping[str, Tensor], first: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if q.shape[-1] > self.query_dim + self.dims.rope:
            return super().read_first(tokens, q, streams, first)
        angles = tokens.angles(q[:, 0], 0)
        assert angles is not None  # `map_with_first` leaves a part to rotate without them
        k, v = streams["k_first"].to(q.dtype), streams["v_first"].to(q.dtype)
        mean = tokens.key_mean.view(tokens.n_kv_heads, -1)
        return q, *first_tokens(q[..., : self.query_dim], k, v, mean, *angles)


def fuse_first_tokens(model: nn.Module, *, is_compiled: bool) -> list[Replaced]:
    """Lower latent projections with first tokens that nobody watches; return them."""
    return [
        replace_class(projection, FusedFirstTokens)
        for layer in model.modules()
        if isinstance(layer, AttentionLayer)
        for projection in [layer.projection]
        if isinstance(projection, LatentProjection) and not isinstance(projection, FusedFirstTokens)
        if projection.first is not None and has_kernel("first_tokens", projection.q_sem_map)
        if not has_hooks(projection) and not has_hooks(projection.first)
    ]
