"""Latent decoupled attention: the cache stores c and k_geo only, whatever the number of heads."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from caramba.cache.view import CacheView
from caramba.config.layer import AttentionLayerConfig
from caramba.layer.documents import Documents
from caramba.layer.first_tokens import FirstTokens, attend_with_prefix
from caramba.layer.gated import GatedProjection
from caramba.layer.projection import Angles, Queries, angles_at, bounds, select_rows, split_heads
from caramba.layer.rms_norm import RMSNorm
from caramba.layer.rope import RotaryEmbedding, rotate
from caramba.layer.score import HALF_PRECISION, CausalScore, Null


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
    has no break there.

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

    def __init__(self, config: AttentionLayerConfig) -> None:
        super().__init__(config)
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

    def forward(
        self,
        x: Tensor,
        offset: int | Tensor = 0,
        rows: Tensor | None = None,
        angles: Angles = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        asking = select_rows(x, rows)
        q, c, k_geo = self.linears(x, asking)
        q, k_geo = split_heads(q, self.dims.n_heads), k_geo[:, None]
        found = self.angles(offset, x.shape[1], x.device) if angles is None else angles
        asked = None
        if found is not None:
            asked = angles_at(found[0], rows), angles_at(found[1], rows)
            k_geo = k_geo if angles is not None else rotate(k_geo, *found)
        streams = {"c": c[:, None], "k_geo": k_geo.to(c.dtype)}
        if self.first is None:
            return self.map_queries(asking, q, asked, c.dtype), streams
        q_geo = self._geometric(q, asked)
        q_first, kept = self.first(x, q, offset, rows)
        return self._concatenate_paths(asking, q, q_geo, c.dtype, q_first), streams | kept

    def linears(self, x: Tensor, asking: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries of the tokens `asking`, and the latent c and the geometric key of x before RoPE."""
        q, c, k_geo = self.q(asking), self.c(x), self.k_geo(x)
        return q, c if self.c_norm is None else self.c_norm(c), k_geo

    def map_queries(self, x: Tensor, q: Tensor, angles: Angles, dtype: torch.dtype) -> Tensor:
        """Return [q_h, RoPE(q_h G_h)] of the tokens x, gated and scaled."""
        return self._concatenate_paths(x, q, self._geometric(q, angles), dtype)

    def _geometric(self, q: Tensor, angles: Angles) -> Tensor:
        """Return RoPE(q_h G_h). Shape: [B, H, T, D] to [B, H, T, Dgeo]."""
        q_geo = torch.einsum("bhtd,hdg->bhtg", q, self.q_geo_map)
        return q_geo if angles is None else rotate(q_geo, *angles)

    def attend(
        self,
        q: Tensor,
        streams: Mapping[str, Tensor],
        score: CausalScore,
        null: Null = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Return head outputs [B, H, T, D] by the form that takes fewer FLOPs."""
        n_queries, n_keys = q.shape[2], streams["c"].shape[2]
        if score.window is not None:
            n_keys = min(n_keys, score.window + n_queries - 1)
        if expanding_is_cheaper(n_queries, n_keys, self.dims.v, self.query_dim):
            return self.attend_expanded(q, streams, score, documents)
        return self.attend_absorbed(q, streams, score, documents)

    def attend_expanded(
        self, q: Tensor, streams: Mapping[str, Tensor], score: CausalScore, documents: Documents | None = None
    ) -> Tensor:
        """Attend with a key [A_h c, k_geo] and a value c U_h for every head."""
        n_keys, (first, starts) = streams["c"].shape[2], bounds(documents)
        if score.window is not None:
            # Do not expand keys outside every query's window.
            n_keys = min(n_keys, score.window + q.shape[2] - 1)
        k, v = self.keys_values({name: streams[name][:, :, -n_keys:].to(q.dtype) for name in ("c", "k_geo")})
        if self.first is not None:
            q, kept, total = self._read_first(self.first, q, streams, first)
            return self.first.join(score, q, k, v, kept, total, first)
        null = None
        if self.null_c is not None and self.null_geo is not None:
            rows = {"c": self.null_c.expand(1, 1, 1, -1), "k_geo": self.null_geo.expand(1, 1, 1, -1)}
            null_k, null_v = self.keys_values(rows)
            null = null_k.flatten(), null_v.flatten()
        return score(q, k, v, null, first, starts)

    def attend_absorbed(
        self, q: Tensor, streams: Mapping[str, Tensor], score: CausalScore, documents: Documents | None = None
    ) -> Tensor:
        """Attend with queries [q_h A_h, q_geo] to the one key [c, k_geo] and the one value c.

        A cache stores that key as `joined`, whose first part is the value. Backends that require equal widths get the
        whole key as value and the extra output features are dropped, because padding c would be a copy.
        """
        kept = total = None
        first, starts = bounds(documents)
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
            return self.map_values(score(queries, key, value, null, first, starts)[..., : self.dims.v])
        read, share = attend_with_prefix(score, queries, key, value, total, self.first.n_tokens, first)
        out = self.map_values(read[..., : self.dims.v])
        return out + (share * kept).to(out.dtype)

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

    def cache_queries(self, q: Tensor) -> Queries:
        """Return the queries q_h A_h [B, H, T, R] and q_geo [B, H, T, Dgeo] of the absorbed form."""
        q_sem, q_geo = q.split((self.query_dim, self.dims.rope), dim=-1)
        mapped = torch.einsum("bhtd,hdr->bhtr", q_sem, self.q_sem_map)
        return mapped, q_geo.to(mapped.dtype)

    def attend_cache(self, q: Queries, keys: CacheView, window: int | None, null: Null = None) -> Tensor:
        """Attend in the absorbed form."""
        return self.map_values(self.read_cache(q, keys, window))

    def read_cache(self, q: Queries, keys: CacheView, window: int | None) -> Tensor:
        """Return what every head reads of the cached latents. Shape: [B, H, T, R]."""
        null = None
        if self.null_c is not None and self.null_geo is not None:
            null = self.null_c[None], self.null_geo[None]
        return keys.attend(*q, ("c", "k_geo"), window=window, null=null)

    def map_values(self, read: Tensor) -> Tensor:
        """Map each head's read of the latent to its value width, [B, H, T, R] to [B, H, T, D]."""
        return torch.einsum("bhtr,hrd->bhtd", read, self.v_up)

    def keys_values(self, streams: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return expanded keys [B, H, S, D + Dgeo] and values [B, H, S, D] of every head.

        Both are views of [B, S, H, ·], the memory order of fused backends and of one GEMM over all heads.
        """
        heads, c, k_geo = self.dims.n_heads, streams["c"].squeeze(1), streams["k_geo"].squeeze(1)
        v = self.project_values(c).transpose(1, 2)
        k_sem = self.project_keys(c)
        geo = k_geo.to(k_sem.dtype)[:, :, None].expand(-1, -1, heads, -1)
        return torch.cat((k_sem, geo), dim=-1).transpose(1, 2), v

    def project_keys(self, c: Tensor) -> Tensor:
        """Return A_h c of every head. Shape: [B, S, R] to [B, S, H, D]."""
        return F.linear(c, self.q_sem_map.flatten(0, 1)).unflatten(-1, (self.dims.n_heads, -1))

    def project_values(self, c: Tensor) -> Tensor:
        """Return c U_h of every head. Shape: [B, S, R] to [B, S, H, D]."""
        weight = self.v_up.transpose(1, 2).flatten(0, 1)
        return F.linear(c, weight).unflatten(-1, (self.dims.n_heads, -1))
