"""Launcher of `caramba::dba_decode` on caches of numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from caramba.kernels.metal.library import TYPES, find, group_size
from torch import Tensor

MOST_GROUPS, LEAST_TILES = 64, 4
"""Threadgroups that splits are made for, and tiles of keys that each has at least."""
MOST_EXTRA = 0.04
"""Bytes of splits over those of keys."""
REGISTERS = 64
"""Sums of a thread."""
WIDEST = 1024
"""Widest value."""


def dba_decode(
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
    admit: Callable[..., Any] | None = None,
) -> Any:
    given = (q_sem, q_geo, kinds, k_sem, k_geo, v, seqlens, n_packed, null, window, max_seqlen, n_splits)
    instead = None if admit is None else admit(*given)
    if instead is not None:
        return instead(*given)
    streams = [k_sem, k_geo, v or k_sem]
    if any(len(parts) > 1 for parts in streams) or q_sem.dtype not in TYPES:
        return NotImplemented
    sem, geo, values = (parts[0] for parts in streams)
    n_stored = min(x.shape[2] for x in (sem, geo, values))
    (batch, heads, queries, _), kv_heads, v_width = q_sem.shape, sem.shape[1], values.shape[3]
    if not q_sem.numel() or not n_stored or not 0 < v_width <= WIDEST:
        return NotImplemented
    n_rows = heads // kv_heads * queries
    rows, keys, threads, columns = shape_of(n_rows, v_width)
    tiles = -(-n_rows // rows)
    if not n_splits:
        longest = min(max_seqlen, n_stored) if max_seqlen > 0 else n_stored
        key_bytes = sum(x[0].shape[3] * x[0].element_size() for x in (k_sem, k_geo, v) if x)
        query_bytes = (q_sem.shape[3] + q_geo.shape[3]) * q_sem.element_size()
        row_bytes = query_bytes + 8 * (v_width + 2)
        n_splits = splits_of(batch * kv_heads * tiles, longest, keys, key_bytes, n_rows * row_bytes)
    types = {"Q": q_sem, "SEM": sem, "GEO": geo, "VALUE": values}
    library = find(
        "dba_decode",
        **{name: TYPES[x.dtype] for name, x in types.items()},
        **{"ROWS": rows, "KEYS": keys, "THREADS": threads, "COLUMNS": columns},
    )
    out = q_sem.new_empty((batch, heads, queries, v_width))
    sums = q_sem.new_empty((batch, heads, queries), dtype=torch.float32)
    room = batch * heads * queries * n_splits * (v_width + 2) if n_splits > 1 else 1
    parts = torch.empty(room, dtype=torch.float32, device=q_sem.device)
    queries_of = q_sem.contiguous(), q_geo.contiguous()
    rows_of_null = [x.contiguous() for x in (null if len(null) != 2 else (*null, null[0]))]
    library.dba_decode(
        *(*queries_of, sem, geo, values, seqlens, *(rows_of_null or (queries_of[0],) * 3)),
        *(out, sums, parts, q_sem.shape[3], q_geo.shape[3], v_width, kv_heads, n_rows, queries),
        *(*sem.stride()[:3], *geo.stride()[:3], *values.stride()[:3]),
        *(n_stored, window, n_splits, int(bool(null))),
        threads=(n_splits * tiles * threads, kv_heads, batch),
        group_size=(threads, 1, 1),
    )
    if n_splits > 1:
        size = group_size(v_width)
        library.dba_decode_merge(
            *(parts, out, sums, v_width, n_splits), threads=(sums.numel() * size,), group_size=(size,)
        )
    return out, sums


def shape_of(n_rows: int, v_width: int) -> tuple[int, int, int, int]:
    """Return rows and keys of a tile, threads, and columns of a thread: scores are shared out evenly, and sums fit."""
    rows = next(size for size in (1, 4, 16, 32) if size >= min(n_rows, 32))
    threads = 256 if rows * -(-v_width // 128) > REGISTERS else 128
    columns = -(-v_width // threads)
    if rows * columns > REGISTERS:
        rows = 16
    return rows, 128 if rows == 1 else 32, threads, columns


def splits_of(groups: int, longest: int, keys: int, key_bytes: int, row_bytes: int) -> int:
    """Return how many parts the keys are cut into, by shapes alone.

    `groups` threadgroups attend without a split. What a split moves besides its share of `longest` keys of `key_bytes`
    is to be a small part of that: `row_bytes` are its rows' queries, and the sums that it writes and the merge reads.
    """
    cheap = int(MOST_EXTRA * longest * key_bytes) // row_bytes
    return max(1, min(MOST_GROUPS // groups, cheap, longest // (keys * LEAST_TILES)))
