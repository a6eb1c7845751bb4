"""Latent decoupled attention: the cache stores c and k_geo only, whatever the number of heads."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from caramba.cache.view import CacheView
from caramba.config.attention_dims import align_width
from caramba.config.layer import AttentionLayerConfig
from caramba.layer.documents import Documents
from caramba.layer.projection import (
    Angles,
    GatedProjection,
    Queries,
    angles_at,
    bounds,
    select_rows,
    split_heads,
)
from caramba.layer.rms_norm import RMSNorm
from caramba.layer.rope import RotaryEmbedding, rotate
from caramba.layer.score import HALF_PRECISION, CausalScore, Null
from caramba.ops.backend import upcast

TWO_WIDTHS_LIMIT = 128


class FirstTokens(nn.Module):
    """Keys and values of the first n tokens of a sequence, as in grouped-query attention.

    score(t, u < n) = (RoPE_t(q_h) . RoPE_u(k_g,u) - q_h . mean_g) / sqrt(D), with q_h the same D wide query that the
    maps into the latent read, g the key/value head of head h, and RoPE over all of D by frequencies of its own, which
    are part of the state dict. `key_mean` is what surgery takes from the keys of the *other* tokens by centring
    them: a constant of each query, which the softmax over them alone would not see. Values lack the mean that surgery
    puts into the output's bias.

    Surgery copies the teacher's weights. They stay trainable: the queries are shared, so frozen keys would no longer
    match them.

    Shape: k [K*D, M], v [K*D, M] with a bias, `key_mean` [K*D].

    Reference: Xiao et al., 2023, arXiv:2309.17453 (first tokens as attention sinks).
    """

    def __init__(self, config: AttentionLayerConfig) -> None:
        super().__init__()
        dims, width = config.dims(), config.query_dim
        self.n_tokens, self.n_kv_heads = dims.first_tokens, dims.n_kv_heads
        self.k = nn.Linear(config.d_model, dims.n_kv_heads * width, bias=bool(config.bias))
        self.v = nn.Linear(config.d_model, dims.n_kv_heads * width)
        self.key_mean = nn.Parameter(torch.zeros(dims.n_kv_heads * width))
        self.rope = (
            RotaryEmbedding(width, config.rope_base, config.rope_scaling, explicit=True)
            if config.rope_enabled
            else None
        )

    def reset_parameters(self) -> None:
        """Set the mean to zero."""
        nn.init.zeros_(self.key_mean)

    def forward(
        self, x: Tensor, q: Tensor, offset: int | Tensor = 0, rows: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the queries q [B, H, T, D] after RoPE, and the streams of the tokens among the first n.

        Queries of the tokens `rows` int64 [B, n] alone are [B, H, n, D].

        With the position of every token, [B, T], where documents begin anywhere, the streams are those of all tokens.
        """
        angles = self.angles(x, offset)
        if angles is not None:
            cos, sin = angles
            q = rotate(q, angles_at(cos, rows), angles_at(sin, rows))
        return q, self.streams(x, offset, angles)

    def angles(self, x: Tensor, offset: int | Tensor) -> Angles:
        """Return cos and sin of the tokens x from position `offset` on, None without RoPE."""
        return None if self.rope is None else self.rope(offset, x.shape[1], x.device)

    def streams(self, x: Tensor, offset: int | Tensor, angles: Angles) -> dict[str, Tensor]:
        """Return keys after RoPE and values of the tokens among the first n, as `forward`."""
        n = x.shape[1] if isinstance(offset, Tensor) else min(max(self.n_tokens - offset, 0), x.shape[1])
        k, v = split_heads(self.k(x[:, :n]), self.n_kv_heads), split_heads(self.v(x[:, :n]), self.n_kv_heads)
        if angles is not None:
            cos, sin = angles
            k = rotate(k, cos[..., :n, :], sin[..., :n, :])
        return {"k_first": k.to(v.dtype), "v_first": v}

    def scores(self, q: Tensor, q_sem: Tensor, k: Tensor) -> Tensor:
        """Return scores [B, H, T, S] of scaled queries on keys k [B, K, S, D], without the causal mask."""
        return first_scores(q, q_sem, k, self.key_mean.view(self.n_kv_heads, -1))

    def read(
        self, q: Tensor, q_sem: Tensor, k: Tensor, v: Tensor, n_keys: int, first: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend to the first tokens only, see `read_first`."""
        mean = self.key_mean.view(self.n_kv_heads, -1)
        return read_first(q, q_sem, k, v, mean, self.n_tokens, n_keys, first)

    def join(
        self,
        score: CausalScore,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kept: Tensor,
        total: Tensor,
        first: Tensor | None = None,
    ) -> Tensor:
        """Attend to all later tokens in one softmax with the first, whose output is `kept`, log-sum-exp `total`.

        Shape: as in `attend_with_prefix`, kept [B, H, T, Dv]; returns [B, H, T, Dv].
        """
        read, share = attend_with_prefix(score, q, k, v, total, self.n_tokens, first)
        return read + (share * kept).to(read.dtype)


def first_scores(q: Tensor, q_sem: Tensor, k: Tensor, mean: Tensor) -> Tensor:
    """Return q . k - q_sem . mean of every head, in at least fp32, also under autocast.

    Shape: q and q_sem [B, H, T, D], mean [K, D], k [B, K, S, D] to [B, H, T, S], or a set of keys for each query,
    [B, K, T, n, D], to [B, H, T, n].
    """
    with torch.autocast(q.device.type, enabled=False):
        grouped, semantic = (upcast(x).unflatten(1, (mean.shape[0], -1)) for x in (q, q_sem))
        shift = torch.einsum("bkgtd,kd->bkgt", semantic, mean.to(semantic.dtype))
        scores = _per_group(grouped, k.to(grouped.dtype).mT)
        return (scores - shift[..., None]).flatten(1, 2)


def read_first(
    q: Tensor,
    q_sem: Tensor,
    k: Tensor,
    v: Tensor,
    mean: Tensor,
    n_tokens: int,
    n_keys: int,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend causally to the first `n_tokens` only; return outputs [B, H, T, D] and log-sum-exp [B, H, T, 1].

    The T queries are the last of `n_keys` positions, k and v [B, K, S, D] those of the first tokens so far. With
    `first` [B, T], the place in the row where each query's document begins, k and v are those of all T tokens.
    Returns at least fp32.
    """
    n_queries = q.shape[2]
    last = torch.arange(n_keys - n_queries, n_keys, device=q.device)[:, None]
    if first is None:
        hidden = torch.arange(k.shape[2], device=q.device) > last
    else:
        places = first[:, :, None] + torch.arange(n_tokens, device=q.device)
        hidden = (places > last)[:, None]
        rows = torch.arange(len(first), device=q.device)[:, None, None]
        places = places.clamp_max(n_queries - 1)
        k, v = (x.transpose(1, 2)[rows, places].permute(0, 3, 1, 2, 4) for x in (k, v))
    scores = first_scores(q, q_sem, k, mean).masked_fill(hidden, float("-inf"))
    total = scores.logsumexp(-1, keepdim=True)
    with torch.autocast(q.device.type, enabled=False):
        weights = (scores - total).exp().unflatten(1, (mean.shape[0], -1))
        return _per_group(weights, v.to(weights.dtype)).flatten(1, 2), total


def _per_group(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply [B, K, G, T, n] by a matrix of each group, [B, K, n, m], or of each of its queries, [B, K, T, n, m]."""
    if matrix.dim() == 4:
        return (x.flatten(2, 3) @ matrix).unflatten(2, x.shape[2:4])
    return (x.transpose(2, 3) @ matrix).transpose(2, 3)


def attend_with_prefix(
    score: CausalScore,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    total: Tensor,
    n_tokens: int,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to all tokens after a prefix, in one softmax with the prefix's log-sum-exp `total`.

    To a query, the prefix acts as one key that scores `total`. So `total` becomes a query feature that only this key
    reads, split in two for half precision. The key's value is an indicator that yields the prefix's share of the
    attention. This takes one fused call of the score op with a few extra features.

    Shape: q [B, H, T, Dq], k [B, K, S, Dq] and v [B, K, S, Dv] of all positions, total [B, H, T, 1]; returns the
    weighted output of the other tokens [B, H, T, Dv], and the prefix's share [B, H, T, 1]. v may be k itself.
    """
    high = total.to(q.dtype)
    q = _pad_to(torch.cat((q, high, (total - high).to(q.dtype)), dim=-1), q.shape[-1] + 2)
    width, v_width = k.shape[-1], v.shape[-1]
    is_one = v is k
    k = _pad_to(k.to(q.dtype), width + 2)
    # Only cuDNN takes two widths, and none above 128: beyond it flash attention wants one.
    v_columns = v_width + 1 if k.shape[-1] <= TWO_WIDTHS_LIMIT else k.shape[-1]
    v = k if is_one else _pad_to(v.to(q.dtype), v_columns)
    key, value = q.new_zeros(k.shape[-1]), q.new_zeros(v.shape[-1])
    key[width : width + 2] = 1.0
    value[v_width] = 1.0
    if first is not None:
        null = key.repeat(k.shape[1]), value.repeat(v.shape[1])
        out = score(q, k, v, null, first + n_tokens)
        return out[..., :v_width], out[..., v_width : v_width + 1]
    n_queries, n_keys = q.shape[2], k.shape[2]
    early = min(max(n_tokens - (n_keys - n_queries), 0), n_queries)  # they see first tokens only
    if early == n_queries:
        return q.new_zeros(*q.shape[:3], v_width), q.new_ones(*q.shape[:3], 1)
    q, k, v = q[:, :, early:], k[:, :, n_tokens:], v[:, :, n_tokens:]
    k = torch.cat((_row(key, k), k), dim=2)
    v = k if is_one else torch.cat((_row(value, v), v), dim=2)
    if q.shape[2] == k.shape[2] - 1 and q.shape[2] > 1:
        # A query for that key as well makes this plain causality, which needs no mask.
        out = score(F.pad(q, (0, 0, 1, 0)), k, v)[:, :, 1:]
    else:
        out = score(q, k, v)
    read, share = out[..., :v_width], out[..., v_width : v_width + 1]
    return F.pad(read, (0, 0, early, 0)), F.pad(share, (0, 0, early, 0), value=1.0)


def _pad_to(x: Tensor, width: int) -> Tensor:
    """Pad x with zero features to `width`, rounded up to the alignment of fused backends."""
    return F.pad(x, (0, align_width(width) - x.shape[-1]))


def _row(one: Tensor, x: Tensor) -> Tensor:
    return one.expand(*x.shape[:2], 1, -1)


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
        self, x: Tensor, offset: int | Tensor = 0, rows: Tensor | None = None, angles: Angles = None
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
        q, kept = self.map_with_first(self.first, x, q, asked, c.dtype, offset, rows)
        return q, streams | kept

    def linears(self, x: Tensor, asking: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries of the tokens `asking`, and the latent c and the geometric key of x before RoPE."""
        q, c, k_geo = self.q(asking), self.c(x), self.k_geo(x)
        return q, c if self.c_norm is None else self.c_norm(c), k_geo

    def map_queries(self, x: Tensor, q: Tensor, angles: Angles, dtype: torch.dtype) -> Tensor:
        """Return [q_h, RoPE(q_h G_h)] of the tokens x, gated and scaled."""
        return self._concatenate_paths(x, q, self._geometric(q, angles), dtype)

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
        """Return [q_h, RoPE(q_h G_h), RoPE(q_h)], the last for the first tokens, and the streams of these."""
        q_first, kept = tokens(x, q, offset, rows)
        q_geo = self._geometric(q, angles)
        return self._concatenate_paths(select_rows(x, rows), q, q_geo, dtype, q_first), kept

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
            q, kept, total = self.read_first(self.first, q, streams, first)
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
            q, kept, total = self.read_first(self.first, q, streams, first)
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

    def read_first(
        self, tokens: FirstTokens, q: Tensor, streams: Mapping[str, Tensor], first: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split off the queries of the first tokens; return the others, the first tokens' output and log-sum-exp."""
        q, q_first = q.split((self.query_dim + self.dims.rope, self.query_dim), dim=-1)
        n_keys = streams["c"].shape[2]
        q_sem = q[..., : self.query_dim]
        return q, *tokens.read(q_first, q_sem, streams["k_first"], streams["v_first"], n_keys, first)

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
