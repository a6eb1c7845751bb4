"""What `caramba::dba_decode` takes: checks by shapes and dtypes, and of lengths that only the device knows."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.config.kvcache import EXACT_KINDS
from caramba.errors import ConfigError
from caramba.ops.formats import STORED, get_block_format

ZEROS = "zeros"
"""The kind of geometric keys that are all zero, see `StoredStream`."""
MAX_QUERIES = 8
"""Queries per sequence that one call takes: a token, or a few drafted ones to verify."""
MAX_SPLITS = 512
"""Parts that the work of one sequence is cut into at most."""


def check_dba_decode(
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
) -> tuple[int, int]:
    """Refuse what the op does not take, by shapes and dtypes alone; return key/value heads and the value width."""
    batch, heads, n_queries, _ = _of_rank(q_sem, "q_sem", 4)
    if not q_sem.is_floating_point():
        raise _wrong("q_sem", q_sem.dtype, "a floating dtype")
    alike = (q_geo.dtype, q_geo.device) == (q_sem.dtype, q_sem.device)
    if q_geo.dim() != 4 or tuple(q_geo.shape[:3]) != (batch, heads, n_queries) or not alike:
        wanted = f"[{batch}, {heads}, {n_queries}, Dgeo] in q_sem's {q_sem.dtype} on {q_sem.device}"
        raise _wrong("q_geo", _said(q_geo), wanted)
    if not 1 <= n_queries <= MAX_QUERIES:
        raise _wrong(
            "q_sem", f"{n_queries} queries per sequence", f"1 to {MAX_QUERIES}; attend in prefill's form"
        )
    streams = [("k_sem", k_sem, q_sem.shape[-1]), ("k_geo", k_geo, q_geo.shape[-1])]
    if v:
        streams.append(("v", v, _of_rank(v[-1], "v", 4)[-1]))
    if len(kinds) != len(streams):
        raise _wrong("kinds", kinds, f"one for each of {len(streams)} streams")
    if not k_sem:
        raise _wrong("k_sem", "0 tensors", "values, or values, scales and tail")
    kv_heads = _of_rank(k_sem[-1], "k_sem", 4)[1]
    if kv_heads < 1 or heads % kv_heads or (not v and kv_heads != 1):
        wanted = f"a number that divides the {heads} query heads" if v else "1, as a latent has, or pass v"
        raise _wrong("k_sem", f"{kv_heads} key/value heads", wanted)
    for (name, parts, width), kind in zip(streams, kinds, strict=True):
        _check_stream(name, kind, parts, batch, kv_heads, width, q_sem.device)
    if tuple(seqlens.shape) != (batch,) or seqlens.dtype != torch.int32 or seqlens.device != q_sem.device:
        raise _wrong("seqlens", _said(seqlens), f"int32 [{batch}] on {q_sem.device}")
    if batch > 1 and seqlens.stride(0) != 1:
        raise _wrong(
            "seqlens", f"stride {seqlens.stride(0)}", "contiguous lengths; pass seqlens.contiguous()"
        )
    packed = any(kind in STORED for kind in kinds)
    if packed != (n_packed is not None):
        raise _wrong("n_packed", "none" if packed else "one", "one exactly where a stream is quantised")
    if n_packed is not None and (
        tuple(n_packed.shape) not in ((1,), (batch,))
        or n_packed.dtype != torch.int32
        or n_packed.device != q_sem.device
    ):
        raise _wrong("n_packed", _said(n_packed), f"int32 [1] or [{batch}] on {q_sem.device}")
    rows = [(kv_heads, width) for _, _, width in streams]
    like = (q_sem.dtype, q_sem.device)
    if null and (
        [tuple(row.shape) for row in null] != rows or any((row.dtype, row.device) != like for row in null)
    ):
        wanted = f"rows {rows} in {q_sem.dtype} on {q_sem.device}"
        raise _wrong("null", ", ".join(_said(row) for row in null), wanted)
    if min(window, max_seqlen, n_splits) < 0 or n_splits > MAX_SPLITS:
        raise _wrong(
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
            raise _wrong("n_packed", held, f"0 to {blocks}, the tokens that blocks are allocated for")
        most = torch.minimum(most, n_packed + min(tails))
    wrong = ((seqlens < 0) | (seqlens > most)).nonzero().flatten().tolist()
    if wrong:
        got = ", ".join(f"{int(seqlens[b])} in sequence {b} of at most {int(most[b])}" for b in wrong[:4])
        raise _wrong("seqlens", got, "0 to what is allocated")


def _check_stream(
    name: str, kind: str, parts: list[Tensor], batch: int, kv_heads: int, width: int, device: torch.device
) -> None:
    exact = kind in EXACT_KINDS or (kind == ZEROS and name == "k_geo")
    if not exact and kind not in STORED:
        raise _wrong(f"{name}.kind", kind, f"one of {', '.join((*EXACT_KINDS, *STORED))}")
    if len(parts) != (1 if exact else 3):
        raise _wrong(name, f"{len(parts)} tensors", "values" if exact else "values, scales and tail")
    for part in parts:
        _of_rank(part, name, 4)
        if part.device != device or part.shape[0] != batch:
            raise _wrong(name, _said(part), f"{batch} sequences on {device}")
        if part.stride(-1) != 1 and part.shape[-1] > 1:
            raise _wrong(name, f"stride {part.stride(-1)} along the last axis", "1; call .contiguous()")
    if tuple(parts[-1].shape[1::2]) != (kv_heads, width):
        raise _wrong(name, _said(parts[-1]), f"[{batch}, {kv_heads}, tokens, {width}]")
    if exact:
        wanted = {
            "fp32": torch.float32,
            "fp16": torch.float16,
            "bf16": torch.bfloat16,
            ZEROS: torch.bfloat16,
        }[kind]
        if parts[0].dtype != wanted:
            raise _wrong(name, parts[0].dtype, f"{wanted}, the dtype of kind {kind}")
        return
    stored = get_block_format(kind)
    codes, scales, tail = parts
    lanes = (stored.block.n_blocks(kv_heads * width), codes.shape[2])
    if tuple(codes.shape[1:]) != (*lanes, stored.code_width) or codes.dtype != stored.code_dtype:
        raise _wrong(
            f"{name}.values", _said(codes), f"{stored.code_dtype} {[batch, *lanes, stored.code_width]}"
        )
    if tuple(scales.shape[1:]) != (*lanes, 1) or scales.dtype != stored.scale_dtype:
        raise _wrong(f"{name}.scales", _said(scales), f"{stored.scale_dtype} {[batch, *lanes, 1]}")
    if tail.dtype != torch.bfloat16:
        raise _wrong(f"{name}.tail", tail.dtype, "torch.bfloat16")


def _of_rank(x: Tensor, name: str, rank: int) -> torch.Size:
    if x.dim() != rank:
        raise _wrong(name, _said(x), f"{rank} axes")
    return x.shape


def _said(x: Tensor) -> str:
    return f"{x.dtype} {list(x.shape)} on {x.device}"


def _wrong(name: str, got: object, expected: str) -> ConfigError:
    return ConfigError(f"dba_decode: {name}: got {got}, expected {expected}")
