"""The op `caramba::dba_decode`: a few queries of decoupled attention on a cache, in the format it is stored in."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from caramba.config.kvcache import EXACT_KINDS
from caramba.console import logger
from caramba.errors import ConfigError
from caramba.ops.backend import (
    REFERENCE,
    caramba_op,
    describe,
    direct,
    implementation,
    refusal,
    refuse_gradients,
)
from caramba.ops.formats import STORED, dequantize, get_block_format

ZEROS = "zeros"
"""The kind of geometric keys that are all zero, see `StoredStream`."""
EXACT_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, ZEROS: torch.bfloat16}
MAX_QUERIES = 8
"""Queries per sequence that one call takes: a token, or a few drafted ones to verify."""
MAX_SPLITS = 512
"""Parts that the work of one sequence is cut into at most."""

_refuse = functools.partial(refusal, "dba_decode")


def check_dba_decode(*given: Any) -> tuple[int, int]:
    """Refuse what the op does not take, by shapes and dtypes alone; return key/value heads and the value width.

    Takes the arguments of `reference_dba_decode`.
    """
    q_sem, q_geo, kinds, k_sem, k_geo, v, seqlens, n_packed, null, window, max_seqlen, n_splits = given
    batch, heads, n_queries, _ = _of_rank(q_sem, "q_sem", 4)
    if not q_sem.is_floating_point():
        raise _refuse("q_sem", q_sem.dtype, "a floating dtype")
    alike = (q_geo.dtype, q_geo.device) == (q_sem.dtype, q_sem.device)
    if q_geo.dim() != 4 or tuple(q_geo.shape[:3]) != (batch, heads, n_queries) or not alike:
        wanted = f"[{batch}, {heads}, {n_queries}, Dgeo] in q_sem's {q_sem.dtype} on {q_sem.device}"
        raise _refuse("q_geo", describe(q_geo), wanted)
    if not 1 <= n_queries <= MAX_QUERIES:
        raise _refuse("q_sem", f"{n_queries} queries per sequence", f"1 to {MAX_QUERIES}; attend in prefill's form")
    streams = [("k_sem", k_sem, q_sem.shape[-1]), ("k_geo", k_geo, q_geo.shape[-1])]
    if v:
        streams.append(("v", v, _of_rank(v[-1], "v", 4)[-1]))
    if len(kinds) != len(streams):
        raise _refuse("kinds", kinds, f"one for each of {len(streams)} streams")
    if not k_sem:
        raise _refuse("k_sem", "0 tensors", "values, or values, scales and tail")
    kv_heads = _of_rank(k_sem[-1], "k_sem", 4)[1]
    if kv_heads < 1 or heads % kv_heads or (not v and kv_heads != 1):
        wanted = f"a number that divides the {heads} query heads" if v else "1, as a latent has, or pass v"
        raise _refuse("k_sem", f"{kv_heads} key/value heads", wanted)
    for (name, parts, width), kind in zip(streams, kinds, strict=True):
        _check_stream(name, kind, parts, batch, kv_heads, width, q_sem.device)
    if tuple(seqlens.shape) != (batch,) or seqlens.dtype != torch.int32 or seqlens.device != q_sem.device:
        raise _refuse("seqlens", describe(seqlens), f"int32 [{batch}] on {q_sem.device}")
    if batch > 1 and seqlens.stride(0) != 1:
        raise _refuse("seqlens", f"stride {seqlens.stride(0)}", "contiguous lengths; pass seqlens.contiguous()")
    packed = any(kind in STORED for kind in kinds)
    if packed != (n_packed is not None):
        raise _refuse("n_packed", "none" if packed else "one", "one exactly where a stream is quantised")
    if n_packed is not None and (
        tuple(n_packed.shape) not in ((1,), (batch,))
        or n_packed.dtype != torch.int32
        or n_packed.device != q_sem.device
    ):
        raise _refuse("n_packed", describe(n_packed), f"int32 [1] or [{batch}] on {q_sem.device}")
    rows = [(kv_heads, width) for _, _, width in streams]
    like = (q_sem.dtype, q_sem.device)
    if null and ([tuple(row.shape) for row in null] != rows or any((row.dtype, row.device) != like for row in null)):
        wanted = f"rows {rows} in {q_sem.dtype} on {q_sem.device}"
        raise _refuse("null", ", ".join(describe(row) for row in null), wanted)
    if min(window, max_seqlen, n_splits) < 0 or n_splits > MAX_SPLITS:
        raise _refuse(
            "window, max_seqlen, n_splits",
            (window, max_seqlen, n_splits),
            f"0 or more each, and at most {MAX_SPLITS} splits",
        )
    return kv_heads, streams[-1][2] if v else q_sem.shape[-1]


def span_of(op: str, window: int | None) -> int:
    """Return a window as ops have it, 0 for none.

    Raises:
        ConfigError: a window of nothing.
    """
    if window is None:
        return 0
    if window < 1:
        raise ConfigError(f"{op}: window: got {window}, expected 1 or more, or None for none")
    return window


def check_lengths(streams: list[list[Tensor]], seqlens: Tensor, n_packed: Tensor | None) -> None:
    """Refuse lengths outside what is allocated; this waits for the device.

    Raises:
        ConfigError: a sequence that is longer than its streams, or shorter than nothing.
    """
    if seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    limits = [parts[0].shape[2] for parts in streams if len(parts) == 1]
    tails = [parts[2].shape[2] for parts in streams if len(parts) == 3]
    most = seqlens.new_full(seqlens.shape, min(limits, default=2**31 - 1))
    if n_packed is not None:
        blocks = min(parts[0].shape[2] for parts in streams if len(parts) == 3)
        held = n_packed.tolist()
        if not all(0 <= count <= blocks for count in held):
            raise _refuse("n_packed", held, f"0 to {blocks}, the tokens that blocks are allocated for")
        most = torch.minimum(most, n_packed + min(tails))
    wrong = ((seqlens < 0) | (seqlens > most)).nonzero().flatten().tolist()
    if wrong:
        got = ", ".join(f"{int(seqlens[b])} in sequence {b} of at most {int(most[b])}" for b in wrong[:4])
        raise _refuse("seqlens", got, "0 to what is allocated")


def _check_stream(
    name: str, kind: str, parts: list[Tensor], batch: int, kv_heads: int, width: int, device: torch.device
) -> None:
    exact = kind in EXACT_KINDS or (kind == ZEROS and name == "k_geo")
    if not exact and kind not in STORED:
        raise _refuse(f"{name}.kind", kind, f"one of {', '.join((*EXACT_KINDS, *STORED))}")
    if len(parts) != (1 if exact else 3):
        raise _refuse(name, f"{len(parts)} tensors", "values" if exact else "values, scales and tail")
    for part in parts:
        _of_rank(part, name, 4)
        if part.device != device or part.shape[0] != batch:
            raise _refuse(name, describe(part), f"{batch} sequences on {device}")
        if part.stride(-1) != 1 and part.shape[-1] > 1:
            raise _refuse(name, f"stride {part.stride(-1)} along the last axis", "1; call .contiguous()")
    if tuple(parts[-1].shape[1::2]) != (kv_heads, width):
        raise _refuse(name, describe(parts[-1]), f"[{batch}, {kv_heads}, tokens, {width}]")
    if exact:
        wanted = EXACT_DTYPES[kind]
        if parts[0].dtype != wanted:
            raise _refuse(name, parts[0].dtype, f"{wanted}, the dtype of kind {kind}")
        return
    stored = get_block_format(kind)
    codes, scales, tail = parts
    lanes = (stored.block.n_blocks(kv_heads * width), codes.shape[2])
    if tuple(codes.shape[1:]) != (*lanes, stored.code_width) or codes.dtype != stored.code_dtype:
        raise _refuse(f"{name}.values", describe(codes), f"{stored.code_dtype} {[batch, *lanes, stored.code_width]}")
    if tuple(scales.shape[1:]) != (*lanes, 1) or scales.dtype != stored.scale_dtype:
        raise _refuse(f"{name}.scales", describe(scales), f"{stored.scale_dtype} {[batch, *lanes, 1]}")
    if tail.dtype != torch.bfloat16:
        raise _refuse(f"{name}.tail", tail.dtype, "torch.bfloat16")


def _of_rank(x: Tensor, name: str, rank: int) -> torch.Size:
    if x.dim() != rank:
        raise _refuse(name, describe(x), f"{rank} axes")
    return x.shape


def reference_dba_decode(
    q_sem: Tensor,
    q_geo: Tensor,
    kinds: list[str],
    k_sem: list[Tensor],
    k_geo: list[Tensor],
    v: list[Tensor],
    seqlens: Tensor,
    n_packed: Tensor | None,
    null: list[Tensor],
    window: int,
    max_seqlen: int,
    n_splits: int,
) -> tuple[Tensor, Tensor]:
    """Compute `dba_decode` in float32, in float64 for queries of that dtype, over all that is allocated."""
    wide = torch.promote_types(q_sem.dtype, torch.float32)
    stored = [k_sem, k_geo, *([v] if v else [])]
    streams = [read_stream(kind, parts, n_packed, wide) for kind, parts in zip(kinds, stored, strict=True)]
    n_keys = min(stream.shape[2] for stream in streams)
    lengths = seqlens.clamp(max=n_keys)
    for parts in stored:
        if len(parts) == 3 and n_packed is not None:
            lengths = torch.minimum(lengths, n_packed.clamp(0, parts[0].shape[2]) + parts[2].shape[2])
    written = (torch.arange(n_keys, device=q_sem.device) < lengths[:, None])[:, None, :, None]
    zero = torch.zeros((), dtype=wide, device=q_sem.device)
    read = [torch.where(written, stream[:, :, :n_keys], zero) for stream in streams]
    kv_heads = read[0].shape[1]
    queries = [q.to(wide).unflatten(1, (kv_heads, -1)) for q in (q_sem, q_geo)]
    scores = torch.zeros((), dtype=wide, device=q_sem.device)
    for q, k in zip(queries, read[:2], strict=True):
        scores = scores + torch.einsum("bkgtd,bksd->bkgts", q, k)
    mask = visible(lengths, q_sem.shape[2], n_keys, window)
    scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    values = read[-1] if v else read[0]
    if null:
        rows = [row.to(wide) for row in null]
        own = sum(torch.einsum("bkgtd,kd->bkgt", q, row) for q, row in zip(queries, rows[:2], strict=True))
        scores = torch.cat((torch.as_tensor(own)[..., None], scores), dim=-1)
        first = (rows[-1] if v else rows[0])[None, :, None].expand(values.shape[0], -1, -1, -1)
        values = torch.cat((first, values), dim=2)
    return _softmax_read(scores, values, q_sem.dtype)


def _softmax_read(scores: Tensor, values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return softmax(scores) values and log sum exp(scores), zeros and -inf where every score is -inf."""
    sums = torch.logsumexp(scores, dim=-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -torch.inf)
    safe = torch.where(sums == -torch.inf, torch.zeros_like(sums), sums)
    out = torch.einsum("bkgts,bksd->bkgtd", torch.exp(scores - safe[..., None]), values)
    return out.flatten(1, 2).to(dtype), sums.flatten(1, 2).float()


def visible(lengths: Tensor, n_queries: int, n_keys: int, window: int) -> Tensor:
    """Return which keys each query sees, [B, T, S]."""
    keys = torch.arange(n_keys, device=lengths.device)
    end = lengths[:, None] - n_queries + 1 + torch.arange(n_queries, device=lengths.device)
    mask = keys < end[..., None]
    return mask & (keys >= end[..., None] - window) if window else mask


def read_stream(kind: str, parts: list[Tensor], n_packed: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Dequantise a stored stream to [B, K, S, D], blocks then tail; unused slots are arbitrary."""
    if len(parts) == 1 or n_packed is None:
        return parts[0].to(dtype)
    codes, scales, tail = parts
    batch, kv_heads, n_tail, width = tail.shape
    n_codes = codes.shape[2]
    flat = dequantize(codes.transpose(1, 2), scales.transpose(1, 2)[..., 0], kind, kv_heads * width, dtype)
    blocks = flat.unflatten(2, (kv_heads, width)).transpose(1, 2)
    place = torch.arange(n_codes + n_tail, device=tail.device).expand(batch, -1)
    held = n_packed.clamp(0, n_codes)[:, None].expand(batch, 1).long()
    # One array of both: token u is block u, or tail u - n_packed.
    source = torch.where(place < held, place, (place - held).clamp(max=n_tail - 1) + n_codes)
    both = torch.cat((blocks, tail.to(dtype)), dim=2)
    index = source.clamp(min=0)[:, None, :, None].expand(-1, kv_heads, -1, width)
    return both.gather(2, index)


def host_dba_decode(*given: Any) -> tuple[Tensor, Tensor]:
    """Compute `dba_decode`: on a CPU numbers of all sequences at once, blocks of each by itself, up to what it stores;
    elsewhere by the reference."""
    q_sem, q_geo, kinds, k_sem, k_geo, v, seqlens, n_packed, null, window, _, _ = given
    if not q_sem.is_cpu:
        return reference_dba_decode(*given)
    if null or any(kind not in EXACT_KINDS for kind in kinds):
        streams = list(zip(kinds, [k_sem, k_geo, *([v] if v else [])], strict=True))
        return _sequence_by_sequence(q_sem, q_geo, streams, seqlens, n_packed, null, window)
    stored = [k_sem[0], k_geo[0], *v[:1]]
    n_stored = min(stream.shape[2] for stream in stored)
    counts = [min(count, n_stored) for count in seqlens.tolist()]
    (batch, heads, n_queries, _), kv_heads, n_keys = q_sem.shape, stored[0].shape[1], max(counts, default=0)
    shape = (batch, heads, n_queries)
    if n_keys < 1:
        width = (v[0] if v else k_sem[0]).shape[-1]
        return q_sem.new_zeros((*shape, width)), q_sem.new_full(shape, -torch.inf, dtype=torch.float32)
    wide = torch.promote_types(q_sem.dtype, torch.float32)
    sem, geo, *rest = (stream[:, :, :n_keys].to(wide).flatten(0, 1) for stream in stored)
    # The heads of a group, and their queries, are rows of one product with the keys that they share.
    rows = [q.to(wide).reshape(batch * kv_heads, -1, q.shape[-1]) for q in (q_sem, q_geo)]
    scores = torch.baddbmm(torch.bmm(rows[0], sem.mT), rows[1], geo.mT)
    values = rest[0] if rest else sem
    sees_all = n_queries == 1 and min(counts) == n_keys and not 0 < window < n_keys
    if not sees_all:
        lengths = torch.tensor(counts)
        mask = visible(lengths, n_queries, n_keys, window)[:, None, None]
        grouped = scores.view(batch, kv_heads, -1, n_queries, n_keys)
        scores = grouped.masked_fill_(~mask, -torch.inf).view_as(scores)
        written = (torch.arange(n_keys) < lengths[:, None]).repeat_interleave(kv_heads, 0)
        values = torch.where(written[..., None], values, 0.0)  # slots after a row's length may contain NaN
    top = scores.amax(-1, keepdim=True)
    if not sees_all:
        top.masked_fill_(top == -torch.inf, 0.0)
    shares = scores.sub_(top).exp_()
    total = shares.sum(-1, keepdim=True)
    sums = total.log().add_(top)
    read = torch.bmm(shares, values).div_(total if sees_all else total.masked_fill(total == 0.0, 1.0))
    return read.view(*shape, -1).to(q_sem.dtype), sums.view(shape).float()


def _sequence_by_sequence(
    q_sem: Tensor,
    q_geo: Tensor,
    streams: list[tuple[str, list[Tensor]]],
    seqlens: Tensor,
    n_packed: Tensor | None,
    null: list[Tensor],
    window: int,
) -> tuple[Tensor, Tensor]:
    """Compute `dba_decode` of streams in any formats: each sequence's own tokens, and no others, become numbers."""
    (batch, heads, n_queries, _), kv_heads = q_sem.shape, streams[0][1][-1].shape[1]
    wide = torch.promote_types(q_sem.dtype, torch.float32)
    v_width = streams[-1][1][-1].shape[-1] if len(streams) > 2 else q_sem.shape[-1]
    out = q_sem.new_zeros((batch, heads, n_queries, v_width))
    sums = q_sem.new_full((batch, heads, n_queries), -torch.inf, dtype=torch.float32)
    rows = [row.to(wide)[:, None] for row in null]
    packed = [0] * batch if n_packed is None else n_packed.expand(batch).tolist()
    for b, (length, held) in enumerate(zip(seqlens.tolist(), packed, strict=True)):
        for _, parts in streams:
            held = max(0, min(held, parts[0].shape[2])) if len(parts) == 3 else held
        for _, parts in streams:
            length = min(length, held + parts[2].shape[2] if len(parts) == 3 else parts[0].shape[2])
        if length < 1 and not rows:
            continue
        length = max(0, length)
        numbers = [_numbers(kind, parts, b, length, min(held, length), wide) for kind, parts in streams]
        queries = [q[b].to(wide).reshape(kv_heads, -1, q.shape[-1]) for q in (q_sem, q_geo)]
        # Keys that are one row for all tokens, as zeros may be, make one score.
        scores = sum(torch.bmm(q, k.mT) for q, k in zip(queries, numbers[:2], strict=True))
        assert isinstance(scores, Tensor)
        if scores.shape[-1] != length:
            scores = scores.expand(*scores.shape[:2], length)
        if n_queries > 1 or 0 < window < length:
            mask = visible(torch.tensor([length]), n_queries, length, window)[0]
            scores = (
                scores.reshape(kv_heads, heads // kv_heads, n_queries, length)
                .masked_fill(~mask, -torch.inf)
                .flatten(1, 2)
            )
        values = numbers[-1 if len(numbers) > 2 else 0].expand(-1, length, -1)
        if rows:
            own = sum(torch.bmm(q, row.mT) for q, row in zip(queries, rows[:2], strict=True))
            assert isinstance(own, Tensor)
            scores = torch.cat((own, scores), dim=-1)
            values = torch.cat((rows[-1 if len(rows) > 2 else 0], values), dim=1)
        total = torch.logsumexp(scores, dim=-1)
        top = total.masked_fill(total == -torch.inf, 0.0)
        read = torch.bmm((scores - top[..., None]).exp_(), values)
        out[b] = read.reshape(heads, n_queries, v_width)
        sums[b] = total.reshape(heads, n_queries)
    return out, sums


def _numbers(kind: str, parts: list[Tensor], b: int, length: int, held: int, dtype: torch.dtype) -> Tensor:
    """Dequantise the first `length` tokens of a sequence, of which `n_packed` are in blocks: [K, length, D].

    Of a stream whose tokens are all one row in memory, that row: [K, 1, D].
    """
    if len(parts) == 1:
        is_one = parts[0].stride(2) == 0 and length > 0
        return parts[0][b, :, : 1 if is_one else length].to(dtype)
    codes, scales, tail = parts
    kv_heads, _, width = tail.shape[1:]
    recent = tail[b, :, : length - held].to(dtype)
    if not held:
        return recent
    rows = codes[b, None, :, :held].transpose(1, 2), scales[b, None, :, :held, 0].transpose(1, 2)
    blocks = dequantize(*rows, kind, kv_heads * width, dtype)[0].unflatten(1, (kv_heads, width))
    return torch.cat((blocks.transpose(0, 1), recent), dim=1)


def put(x: Tensor, into: Tensor, starts: list[int]) -> None:
    """Write token t of sequence b at place starts[b] + t, where there is one.

    Shape: x [B, K, T, D], into [B, K, S, D].
    """
    if not starts:
        return
    n_tokens, capacity = x.shape[2], into.shape[2]
    start = starts[0]
    if 0 <= start <= capacity - n_tokens and starts.count(start) == len(starts):
        into.narrow(2, start, n_tokens).copy_(x)
        return
    for t in range(n_tokens):
        inside = [(row, at + t) for row, at in enumerate(starts) if 0 <= at + t < capacity]
        if inside:
            rows, places = torch.tensor(inside).unbind(1)
            into[rows, :, places] = x[:, :, t].to(into.dtype)[rows]


WIDEST = {torch.float32: 128, torch.float16: 512, torch.bfloat16: 512}
"""Widest head that kernels take, by the queries' dtype: tiles fit shared memory, and compile in less than a minute."""


class StoredStream(NamedTuple):
    """One stream as the cache stores it, the whole allocation; unused slots are never read.

    Numbers (fp32, fp16, bf16): `values` [B, K, S, D], any strides but a unit one along D, so both parts of a tensor
    that holds two streams side by side may be passed as views. Blocks (q8_0, q4_0, nf4), as `BlockStore` has them:
    `values` are codes [B, N, S, code_width] of the K*D features of all heads, `scales` [B, N, S, 1], and the
    tokens from `n_packed` on are in `tail` [B, K, C, D], bfloat16. For undivided keys, k_geo has kind `ZEROS`: bf16
    zeros, one row in memory expanded to all tokens. Not every kernel reads it.
    """

    kind: str
    values: Tensor
    scales: Tensor | None = None
    tail: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """What there is, in the op's order: numbers alone, or codes, scales and tail."""
        _, values, scales, tail = self
        if scales is None and tail is None:
            return [values]
        return [part for part in (values, scales, tail) if part is not None]


def kernel_takes(dtype: torch.dtype, widths: Sequence[int]) -> bool:
    """Whether a kernel of the op takes queries of this dtype on streams of these widths per head."""
    return max(widths) <= WIDEST.get(dtype, 0)


def dba_decode(
    q_sem: Tensor,
    q_geo: Tensor,
    k_sem: StoredStream,
    k_geo: StoredStream,
    v: StoredStream | None,
    seqlens: Tensor,
    *,
    n_packed: Tensor | None = None,
    window: int | None = None,
    null: tuple[Tensor, ...] | None = None,
    max_seqlen: int = 0,
    n_splits: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attend: o = softmax(q_sem k_sem^T + q_geo k_geo^T + mask) v, and the logarithm of the sum of exponentials.

    The T queries of sequence b are the last T of its `seqlens[b]` stored tokens: query t sees the first
    seqlens[b] - T + t + 1 of them, with `window` only the last `window` of those. A length beyond what is allocated
    counts as what is allocated; under --debug it is refused, outside of captured graphs. A query that sees nothing
    gets zeros and -inf.

    Queries come scaled. Where a stream of keys is stored Hadamard-rotated the caller rotates its queries, and where
    values are (in `latent`, whenever c is) the output comes out rotated: the caller rotates it back.

    With `v` None the layout is `latent`: one key/value head, K = 1, whose semantic key is the value too (Dv = Dsem).
    Query heads share key/value heads in consecutive groups of H/K. `null` is a semantic key [K, Dsem], a geometric
    key [K, Dgeo] and, unless latent, a value [K, Dv] that every query sees, in q's dtype. `n_packed` is the number
    of tokens that every quantised stream holds as blocks, for all sequences alike or each.

    `max_seqlen` is what the longest sequence is expected to have (0: what is allocated) and only serves to choose
    how the work is cut; `n_splits` sets that (0: chosen). The numbers do not depend on either beyond rounding, and
    nothing depends on lengths on the host, so a captured graph stays right while sequences grow. Calls
    that `kernel_takes` rejects run the reference, also where a kernel is attached.

    Shape: q_sem [B, H, T, Dsem], q_geo [B, H, T, Dgeo], T at most 8, one dtype; seqlens int32 [B]; n_packed int32
    [1] or [B]; returns [B, H, T, Dv] in q's dtype and fp32 [B, H, T], natural logarithms. With two disjoint parts
    of the keys, (o1, l1) and (o2, l2) merge to o1 exp(l1 - l) + o2 exp(l2 - l), l = log(exp(l1) + exp(l2)).

    There are no gradients.

    Raises:
        ConfigError: an argument of another shape, dtype, device or stride, or gradients that are wanted.

    Reference: Milakov and Gimelshein, 2018, arXiv:1805.02867 (online softmax); Dao et al., 2023, Flash-Decoding.
    """
    refuse_gradients("dba_decode", q_sem, q_geo, *(null or ()))
    kinds, sem, geo = [str(k_sem.kind), str(k_geo.kind)], k_sem.tensors, k_geo.tensors
    values: list[Tensor] = []
    if v is not None:
        kinds.append(str(v.kind))
        values = v.tensors
    extra = [] if null is None else list(null)
    span = span_of("dba_decode", window)
    given = (q_sem, q_geo, kinds, sem, geo, values, seqlens, n_packed, extra, span, max_seqlen, n_splits)
    if logger.is_debug and not torch.compiler.is_compiling():
        check_lengths([sem, geo, values], seqlens, n_packed)
    run = direct("dba_decode", q_sem, q_geo, sem[0], seqlens)
    if run is not None:
        return run(*given, admit=_admit)
    instead = _admit(*given)
    if instead is None or implementation("dba_decode", q_sem.device) == REFERENCE:
        return torch.ops.caramba.dba_decode.default(*given)
    return instead(*given)


def _admit(*given: Any) -> Callable[..., tuple[Tensor, Tensor]] | None:
    check_dba_decode(*given)
    q_sem, _, _, sem, geo, values = given[:6]
    widths = [parts[-1].shape[-1] for parts in (sem, geo, values) if parts]
    return None if kernel_takes(q_sem.dtype, widths) else reference_dba_decode


def _fake(*given: Any) -> tuple[Tensor, Tensor]:
    _, width = check_dba_decode(*given)
    q_sem = given[0]
    shape = q_sem.shape[:3]
    return q_sem.new_empty((*shape, width)), q_sem.new_empty(shape, dtype=torch.float32)


caramba_op(
    "dba_decode",
    fake=_fake,
    schema="(Tensor q_sem, Tensor q_geo, str[] kinds, Tensor[] k_sem, Tensor[] k_geo, Tensor[] v, Tensor seqlens, "
    "Tensor? n_packed, Tensor[] null, int window, int max_seqlen, int n_splits) -> (Tensor, Tensor)",
)(host_dba_decode)
