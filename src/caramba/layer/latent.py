"""Latent decoupled attention: the cache stores c and k_geo only, whatever the number of heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from caramba.cache import LayerCache
from caramba.config.layer import AttentionLayerConfig
from caramba.layer.cache_view import CacheView
from caramba.layer.first_tokens import FirstTokens, attend_with_prefix, read_all
from caramba.layer.fused_linear import FusedLinear, can_use_fused, norm_linear
from caramba.layer.gated import GatedProjection
from caramba.layer.projection import Angles, Queries, angles_at, select_rows, split_heads
from caramba.layer.rms_norm import RMSNorm
from caramba.layer.rope import RotaryEmbedding, rotate
from caramba.layer.score import HALF_PRECISION, CausalScore, Null
from caramba.layer.small_batch import has_hooks
from caramba.layer.split_keys import split_key_attention, supports_split_keys
from caramba.ops import has_kernel
from caramba.ops.absorbed_queries import absorbed_queries
from caramba.ops.absorbed_step import absorbed_step
from caramba.ops.latent_queries import has_narrow_queries, latent_queries
from caramba.ops.per_head_linear import per_head_linear


def expanding_is_cheaper(n_queries: int, n_keys: int, latent: int, head_dim: int) -> bool:
    """True if expanding keys and values to every head takes fewer FLOPs than mapping queries into the latent.

    Per head, with R = latent, D = head_dim, T queries on S keys and P causal query-key pairs, the
    expanded form costs 2 S R D + P (2 D + Dgeo) multiplications, the absorbed one 2 T R D + P (2 R + Dgeo): it
    expands when P (R - D) > R D (S - T). A whole forward (T = S) expands when R > D, a decode step never does;
    between the two, with a long past, it takes T > R D / (R - D) queries.
    """
    if n_queries == 1 or latent <= head_dim:
        return False
    if n_queries == n_keys:
        return True
    pairs = n_queries * n_keys - n_queries * (n_queries - 1) // 2
    return pairs * (latent - head_dim) > latent * head_dim * (n_keys - n_queries)


class LatentProjection(GatedProjection):
    """Latent projection: all heads share a latent c = W_c x + b_c and one geometric key k_geo.

    The latent is both semantic key and value:

    score(t, u) = ((q_h A_h) . c_u + RoPE_t(q_h G_h) . RoPE_u(k_geo,u)) / sqrt(D) and o_h = (sum_u a_u c_u) U_h,
    with q_h the D = query_dim wide query of head h, A = `q_sem_map`, G = `q_geo_map`, U = `v_up`.

    Two forms give the same numbers. *Expanded*, head h has the key [A_h c, k_geo] and the value c U_h, D + Dgeo
    and D wide, which fused backends support up to 256. *Absorbed*, all heads' queries [q_h A_h, q_geo] attend to the
    one key [c, k_geo] with the cached value c, and U_h is applied after: there is no work per cached token. The
    numbers of queries and keys decide, see `expanding_is_cheaper`. That depends on shapes only, so a compiled graph
    has no break there. In both forms a dedicated kernel, if there is one, supports wider keys as two parts: see
    `split_keys`.

    `null_attn` adds one latent `null_c` [R] and one geometric key `null_geo` [Dgeo] of no position. Surgery that
    centres its keys has to add the mean's part of the score, q . mu, back to them.

    With `exact_first_tokens` the first n tokens of a sequence have full-width keys and values, `first`, in one softmax
    with the others; their c and k_geo are cached but not read. The gate weighs the latent's two paths only; the
    temperature scales every score.

    With `mla` the latent is c = RMSNorm(W_c x), without a bias, and the frequencies are those of `rope_base`: this is
    multi-head latent attention, so stock engines load it. The norm's eps is large against the latent's mean square: the
    norm is then nearly linear, and its weight starts at sqrt(1 + eps), where a latent of mean square 1 keeps its size.

    Shape: q [H*D, M], c [R, M], k_geo [Dgeo, M], `q_sem_map` [H, D, R], `q_geo_map` [H, D, Dgeo], `v_up` [H, R, D].
    forward returns q [B, H, T, D + Dgeo], its geometric part after RoPE, and c [B, 1, T, R], k_geo [B, 1, T, Dgeo];
    with first tokens q has D features more, those that read them, and k_first, v_first [B, K, <= n, D] are streams.

    Reference: DeepSeek-AI, 2024, arXiv:2405.04434 (latent attention and its absorbed form).
    """

    fusible_linears: ClassVar[tuple[str, ...]] = ("q", "c", "k_geo")
    fuse_in_training: ClassVar[bool] = False

    def __init__(self, config: AttentionLayerConfig) -> None:
        super().__init__(config)
        self.fused_linear: FusedLinear | None = None
        heads, width, latent, geo = self.dims.n_heads, self.query_dim, self.dims.v, self.dims.rope
        self.q = nn.Linear(config.d_model, heads * width, bias=bool(config.bias))
        self.c = nn.Linear(config.d_model, latent, bias=not config.mla)
        self.c_norm = RMSNorm(latent, config.latent_norm_eps) if config.mla else None
        self.k_geo = nn.Linear(config.d_model, geo, bias=bool(config.bias))
        self.q_sem_map = nn.Parameter(torch.empty(heads, width, latent))
        self.q_geo_map = nn.Parameter(torch.empty(heads, width, geo))
        self.v_up = nn.Parameter(torch.empty(heads, latent, width))
        self.null_c = nn.Parameter(torch.zeros(latent)) if config.null_attn else None
        self.null_geo = nn.Parameter(torch.zeros(geo)) if config.null_attn else None
        self.first = FirstTokens(config) if self.dims.first_tokens else None
        self.rope = (
            RotaryEmbedding(geo, config.rope_base, config.rope_scaling, explicit=not config.mla)
            if config.rope_enabled
            else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the maps so that scores and values have the scale of D-wide keys and values.

        `q_sem_map` and `q_geo_map` are normal(0, 1/(R + Dgeo)), `v_up` normal(0, 1/R) (variances).
        """
        super().reset_parameters()
        for weight in (self.q_sem_map, self.q_geo_map):
            nn.init.normal_(weight, std=self.dims.qk**-0.5)
        nn.init.normal_(self.v_up, std=self.dims.v**-0.5)
        if self.c_norm is not None and self.c_norm.weight is not None:
            nn.init.constant_(self.c_norm.weight, (1.0 + self.c_norm.eps) ** 0.5)
        for parameter in (self.null_c, self.null_geo):
            if parameter is not None:
                nn.init.zeros_(parameter)

    def readers(self) -> tuple[nn.Module, ...] | None:
        return (self.q, self.c, self.k_geo) if self.first is None and self.gate_dynamic is None else None

    def forward(
        self,
        x: Tensor,
        offset: int | Tensor = 0,
        rows: Tensor | None = None,
        angles: Angles = None,
        norm: RMSNorm | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        asking = select_rows(x, rows)
        q, c, k_geo = self._products(x, asking, norm)
        q, k_geo = split_heads(q, self.dims.n_heads), k_geo[:, None]
        found = self.angles(offset, x.shape[1], x.device) if angles is None else angles
        asked = None
        if found is not None:
            asked = angles_at(found[0], rows), angles_at(found[1], rows)
            k_geo = k_geo if angles is not None else rotate(k_geo, *found)
        streams = {"c": c[:, None], "k_geo": k_geo.to(c.dtype)}
        if asked is not None and self._is_fused(q, is_step=norm is not None):
            fused = latent_queries(q.transpose(1, 2), self.q_geo_map, *asked, self.scale)
            return fused.transpose(1, 2), streams
        q_geo = torch.einsum("bhtd,hdg->bhtg", q, self.q_geo_map)
        if asked is not None:
            q_geo = rotate(q_geo, *asked)
        extra: tuple[Tensor, ...] = ()
        if self.first is not None:
            q_first, kept = self.first(x, q, offset, rows)
            extra, streams = (q_first,), streams | kept
        return self._concatenate_paths(asking, q, q_geo, c.dtype, *extra), streams

    def _is_fused(self, q: Tensor, *, is_step: bool) -> bool:
        """True if one kernel maps, rotates, scales and concatenates the queries q.

        Used in training, where it saves the most passes, and in small-batch steps, which are bound by launches.
        """
        return (
            self._is_one_path()
            and (torch.is_grad_enabled() or is_step)
            and type(self.q_geo_map) is nn.Parameter
            and has_narrow_queries(q.dtype, self.query_dim, self.dims.rope)
            and has_kernel("latent_queries", q)
        )

    def _is_one_path(self) -> bool:
        return self.gate is None and self.temperature is None and self.first is None

    def _products(
        self, x: Tensor, asking: Tensor, norm: RMSNorm | None, *, reads_views: bool = False
    ) -> tuple[Tensor, ...]:
        """Return the queries of the tokens `asking`, and the latent c and the geometric key of x before RoPE.

        `reads_views` is True if the caller reads views of a fused output without copying them.
        """
        q, c, k_geo = self._linears(x, asking, norm, reads_views)
        return q, c if self.c_norm is None else self.c_norm(c), k_geo

    def _linears(
        self, x: Tensor, asking: Tensor, norm: RMSNorm | None, reads_views: bool
    ) -> tuple[Tensor, ...]:
        fused_linear = self.fused_linear if asking is x else None
        if norm is not None:
            if fused_linear is not None:
                return norm_linear(fused_linear, x, norm).split_with_sizes(fused_linear.widths, dim=-1)
            return (
                norm_linear(self.q, asking, norm),
                norm_linear(self.c, x, norm),
                norm_linear(self.k_geo, x, norm),
            )
        if fused_linear is not None and (reads_views or can_use_fused(fused_linear, x)):
            return fused_linear(x)
        return self.q(asking), *self._keys(x)

    def _keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latent c [B, T, R] and the geometric key before RoPE [B, T, Dgeo].

        Training computes both in one GEMM: each alone is too narrow to keep a GPU busy and reads all of x. Inference
        does not concatenate the weights at every token; replaced layers are called separately.
        """
        if not torch.is_grad_enabled() or type(self.c) is not nn.Linear or type(self.k_geo) is not nn.Linear:
            return self.c(x), self.k_geo(x)
        weight = torch.cat((self.c.weight, self.k_geo.weight))
        bias = None
        if self.c.bias is not None:
            zeros = self.c.bias.new_zeros(self.dims.rope)
            bias = torch.cat((self.c.bias, zeros if self.k_geo.bias is None else self.k_geo.bias))
        c, k_geo = F.linear(x, weight, bias).split((self.dims.v, self.dims.rope), -1)
        return c, k_geo

    def attend(
        self,
        q: Tensor,
        streams: Mapping[str, Tensor],
        score: CausalScore,
        null: Null = None,
        first: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """Return head outputs [B, H, T, D] by the form that takes fewer FLOPs."""
        n_queries, n_keys = q.shape[2], streams["c"].shape[2]
        if score.window is not None:
            n_keys = min(n_keys, score.window + n_queries - 1)
        if expanding_is_cheaper(n_queries, n_keys, self.dims.v, self.query_dim):
            return self.attend_expanded(q, streams, score, first, starts)
        return self.attend_absorbed(q, streams, score, first, starts)

    def attend_expanded(
        self,
        q: Tensor,
        streams: Mapping[str, Tensor],
        score: CausalScore,
        first: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """Attend with a key [A_h c, k_geo] and a value c U_h for every head."""
        n_keys = streams["c"].shape[2]
        if self._supports_split_keys(score, q, n_keys, self.query_dim, are_concatenated=False):
            c, k_geo = (streams[name].to(q.dtype).transpose(1, 2) for name in ("c", "k_geo"))
            return split_key_attention(
                q, self._head_keys(c.squeeze(2)), k_geo, self._head_values(c.squeeze(2)), first
            )
        if score.window is not None:
            # Do not expand keys outside every query's window.
            n_keys = min(n_keys, score.window + q.shape[2] - 1)
        k, v = self.keys_values({name: streams[name][:, :, -n_keys:].to(q.dtype) for name in ("c", "k_geo")})
        if self.first is not None:
            q, kept, total = self._read_first(self.first, q, streams, first)
            return read_all(score, q, k, v, kept, total, self.first.n_tokens, first)
        null = None
        if self.null_c is not None and self.null_geo is not None:
            rows = {"c": self.null_c.expand(1, 1, 1, -1), "k_geo": self.null_geo.expand(1, 1, 1, -1)}
            null_k, null_v = self.keys_values(rows)
            null = null_k.flatten(), null_v.flatten()
        return score(q, k, v, null, first, starts)

    def attend_absorbed(
        self,
        q: Tensor,
        streams: Mapping[str, Tensor],
        score: CausalScore,
        first: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """Attend with queries [q_h A_h, q_geo] to the one key [c, k_geo] and the one value c.

        A cache stores that key as `joined`, whose first part is the value. Backends that require equal widths get the
        whole key as value and the extra output features are dropped, because padding c would be a copy.
        """
        n_keys, are_concatenated = streams["c"].shape[2], "joined" in streams
        if q.shape[2] > 1 and self._supports_split_keys(
            score, q, n_keys, self.dims.v, are_concatenated=are_concatenated
        ):
            c, k_geo = (streams[name].transpose(1, 2) for name in ("c", "k_geo"))
            read = split_key_attention(torch.cat(self.cache_queries(q), dim=-1), c, k_geo, c, first)
            return torch.einsum("bhtr,hrd->bhtd", read, self.v_up)
        kept = total = None
        if self.first is not None:
            q, kept, total = self._read_first(self.first, q, streams, first)
        has_one_width = q.shape[2] > 1 or q.dtype in HALF_PRECISION or self.first is not None
        queries, key = self.score_operands(q, streams)
        null = None
        if self.null_c is not None and self.null_geo is not None:
            null_k = torch.cat((self.null_c, self.null_geo))
            null = null_k, null_k if has_one_width else self.null_c
        value = key if has_one_width else key[..., : self.dims.v]
        if self.first is None or kept is None or total is None:
            read = score(queries, key, value, null, first, starts)
            return torch.einsum("bhtr,hrd->bhtd", read[..., : self.dims.v], self.v_up)
        read, share = attend_with_prefix(score, queries, key, value, total, self.first.n_tokens, first)
        out = torch.einsum("bhtr,hrd->bhtd", read[..., : self.dims.v], self.v_up)
        return out + (share * kept).to(out.dtype)

    def _supports_split_keys(
        self, score: CausalScore, q: Tensor, n_keys: int, width: int, *, are_concatenated: bool
    ) -> bool:
        """True if the split-key kernel applies; semantic keys and values are `width` features wide."""
        is_plain = self.null_c is None and self.first is None
        return is_plain and supports_split_keys(
            score, q, n_keys, (width, self.dims.rope, width), are_concatenated=are_concatenated
        )

    def score_operands(self, q: Tensor, streams: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the absorbed queries and the shared key [c, k_geo].

        Shape: [B, H, T, R + Dgeo] and [B, 1, S, R + Dgeo].
        """
        queries = torch.cat(self.cache_queries(q), dim=-1)
        joined = streams.get("joined")
        key = torch.cat((streams["c"], streams["k_geo"]), dim=-1) if joined is None else joined
        return queries, key.to(q.dtype)

    def _read_first(
        self, rows: FirstTokens, q: Tensor, streams: Mapping[str, Tensor], first: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split off the queries of the first tokens; return the others, the first tokens' output and log-sum-exp."""
        q, q_first = q.split((self.query_dim + self.dims.rope, self.query_dim), dim=-1)
        n_keys = streams["c"].shape[2]
        q_sem = q[..., : self.query_dim]
        return q, *rows.read(q_first, q_sem, streams["k_first"], streams["v_first"], n_keys, first)

    def step(
        self,
        x: Tensor,
        offset: Tensor,
        angles: Angles,
        norm: RMSNorm | None,
        cache: LayerCache,
        places: Tensor,
    ) -> Queries:
        if angles is None or not self._is_absorbed(x):
            return super().step(x, offset, angles, norm, cache, places)
        q, c, k_geo = self._products(x, x, norm, reads_views=True)
        q, c, k_geo = q.unflatten(-1, (self.dims.n_heads, -1)), c[:, None], k_geo[:, None]
        maps = self.q_sem_map, self.q_geo_map
        if has_kernel("absorbed_step", x):
            q = absorbed_step(q, *maps, *angles, self.scale, c, k_geo, cache.allocations, places)
        else:
            self.store({"c": c, "k_geo": k_geo}, angles, cache, places)
            q = absorbed_queries(q, *maps, *angles, self.scale)
        q_sem, q_geo = q.transpose(1, 2).split((self.dims.v, self.dims.rope), dim=-1)
        return q_sem, q_geo

    def _is_absorbed(self, x: Tensor) -> bool:
        """True if one kernel computes the absorbed queries of a decode step.

        It replaces per-head GEMMs and passes that rotate, concatenate and reorder.
        """
        maps = (self.q_sem_map, self.q_geo_map)
        return (
            self._is_one_path()
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled(x.device.type)
            and not has_hooks(self)
            and all(type(one) is nn.Parameter and one.dtype == x.dtype for one in maps)
            and has_narrow_queries(x.dtype, self.query_dim, self.dims.rope)
            and has_kernel("absorbed_queries", x)
        )

    def cache_queries(self, q: Tensor) -> Queries:
        """Return the queries q_h A_h [B, H, T, R] and q_geo [B, H, T, Dgeo] of the absorbed form."""
        q_sem, q_geo = q.split((self.query_dim, self.dims.rope), dim=-1)
        mapped = torch.einsum("bhtd,hdr->bhtr", q_sem, self.q_sem_map)
        return mapped, q_geo.to(mapped.dtype)

    def attend_cache(self, q: Queries, keys: CacheView, window: int | None, null: Null = None) -> Tensor:
        """Attend in the absorbed form."""
        if self.null_c is None and self._is_fused_up(q[0], "dba_decode_up"):
            return keys.attend_up(*q, ("c", "k_geo"), self.v_up, window=window)
        rows = None
        if self.null_c is not None and self.null_geo is not None:
            rows = self.null_c[None], self.null_geo[None]
        read = keys.attend(*q, ("c", "k_geo"), window=window, null=rows)
        return self._up(read)

    def _up(self, read: Tensor) -> Tensor:
        """Map each head's read of the latent to its value width, [B, H, T, R] to [B, H, T, D]."""
        if self._is_fused_up(read, "per_head_linear"):
            return per_head_linear(read.transpose(1, 2), self.v_up).transpose(1, 2)
        return torch.einsum("bhtr,hrd->bhtd", read, self.v_up)

    def _is_fused_up(self, x: Tensor, op: str) -> bool:
        """True if an inference op with a 16-bit kernel can apply `v_up`."""
        is_plain = type(self.v_up) is nn.Parameter and x.dtype in HALF_PRECISION
        return is_plain and not torch.is_grad_enabled() and has_kernel(op, x)

    def keys_values(self, streams: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return expanded keys [B, H, S, D + Dgeo] and values [B, H, S, D] of every head.

        Both are views of [B, S, H, ·], the memory order of fused backends and of one GEMM over all heads.
        """
        heads, c, k_geo = self.dims.n_heads, streams["c"].squeeze(1), streams["k_geo"].squeeze(1)
        v = self._head_values(c).transpose(1, 2)
        if torch.is_grad_enabled() and self._is_one_product(c):
            return self._keys_by_one_product(c, k_geo).unflatten(-1, (heads, -1)).transpose(1, 2), v
        k_sem = self._head_keys(c)
        geo = k_geo.to(k_sem.dtype)[:, :, None].expand(-1, -1, heads, -1)
        return torch.cat((k_sem, geo), dim=-1).transpose(1, 2), v

    def _head_keys(self, c: Tensor) -> Tensor:
        """Return A_h c of every head. Shape: [B, S, R] to [B, S, H, D]."""
        return F.linear(c, self.q_sem_map.flatten(0, 1)).unflatten(-1, (self.dims.n_heads, -1))

    def _head_values(self, c: Tensor) -> Tensor:
        """Return c U_h of every head. Shape: [B, S, R] to [B, S, H, D]."""
        weight = self.v_up.transpose(1, 2).flatten(0, 1)
        return F.linear(c, weight).unflatten(-1, (self.dims.n_heads, -1))

    def _is_one_product(self, c: Tensor) -> bool:
        """True if a block-diagonal GEMM is cheaper than concatenating keys and splitting their gradients.

        That holds on GPUs in 16 bits if the geometric part is not wider than the semantic one.
        """
        return c.is_cuda and c.dtype in HALF_PRECISION and self.dims.rope <= self.query_dim

    def _keys_by_one_product(self, c: Tensor, k_geo: Tensor) -> Tensor:
        """Return every head's [A_h c, k_geo], [B, S, H*(D + Dgeo)], as [c, k_geo] times [[A_h, 0], [0, 1]].

        Ones and zeros are exact in every dtype, so the geometric part is the same for all heads to the last bit.
        """
        heads, _, latent = self.q_sem_map.shape
        geo = self.dims.rope
        ones = torch.eye(geo, dtype=self.q_sem_map.dtype, device=c.device).expand(heads, -1, -1)
        weight = torch.cat((F.pad(self.q_sem_map, (0, geo)), F.pad(ones, (latent, 0))), dim=1)
        return F.linear(torch.cat((c, k_geo.to(c.dtype)), dim=-1), weight.flatten(0, 1))
