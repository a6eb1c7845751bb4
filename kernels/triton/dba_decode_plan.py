"""Plans of `caramba::dba_decode`: what calls of one form launch, with which arguments in which order."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from caramba.kernels.cuda.decode import split_launch
from caramba.kernels.cuda.launch import CudaLaunch
from caramba.kernels.triton.dba_decode_heads import decode_heads
from caramba.kernels.triton.dba_decode_kernel import combine_kernel, split_kv_kernel
from caramba.kernels.triton.dba_decode_latent import decode_latent
from caramba.kernels.triton.dba_decode_modes import (
    heads_per_program,
    is_latent_by_words,
    latent_mode,
    mode,
    power_of_2,
    word_mode,
)
from caramba.kernels.triton.dba_decode_table import DecodeConfig, DecodeShape
from caramba.kernels.triton.launch import ALIGNMENT, INTERPRETED, Launch, arch, contiguous_strides
from caramba.kernels.triton.pdl import pdl_options, supports_pdl
from torch import Tensor

JOIN_FEATURES = 32, 128
"""Features of a program that combines splits: few, so that a step's few rows keep a device busy, and from MANY_ROWS on
most, so that not thousands of programs are launched. They are in the registers of one warp."""
MANY_ROWS = 512
TAIL_TOKENS = 32
"""Tokens of a tile of tails, which are few: what is read word by word takes registers."""


Shape = tuple[int, ...]


@dataclass(frozen=True)
class DecodePlan:
    """What calls of one form launch. Without a `join` there is one split, which writes the output itself.

    Tensors are named by their places in `arguments`: those to be made contiguous, what splits read and what their join
    does. What splits attend is as the output, which rounds as finely, and is followed by their sums of exponentials,
    from byte `sums_from` of `part_bytes` on.
    """

    copied: tuple[int, ...]
    read: tuple[int, ...]
    joined: tuple[int, ...]
    out: Shape
    strides: Shape
    sum_strides: Shape
    sums_from: int
    part_bytes: int
    n_splits: int
    split: Launch | CudaLaunch
    join: Launch | None
    is_empty: bool
    """Whether there is nothing to write."""
    joins_early: bool
    """Whether what joins the splits begins while they end, and waits for what they have stored."""


def arguments(
    q_sem: Tensor,
    q_geo: Tensor,
    k_sem: list[Tensor],
    k_geo: list[Tensor],
    v: list[Tensor],
    seqlens: Tensor,
    n_packed: Tensor | None,
    null: list[Tensor],
) -> tuple[Tensor, ...]:
    """Return all tensors of a call in the order of a `DecodePlan`."""
    packed = () if n_packed is None else (n_packed,)
    return (q_sem, q_geo, seqlens, *packed, *k_sem, *k_geo, *v, *null)


def decode_shape(
    q_sem: Tensor,
    q_geo: Tensor,
    kinds: list[str],
    k_sem: list[Tensor],
    k_geo: list[Tensor],
    v: list[Tensor],
    max_seqlen: int,
) -> DecodeShape:
    """Return what the table is asked by; without a hint, for sequences that fill what is allocated."""
    batch, heads, n_queries, width = q_sem.shape
    kv_heads = k_sem[-1].shape[1]
    most = max(1, min(_capacity(parts) for parts in (k_sem, k_geo, v) if parts))
    return DecodeShape(
        arch=arch(q_sem.device),
        formats=tuple(kinds),
        dims=(width, q_geo.shape[-1], v[-1].shape[-1] if v else width),
        rows=heads // kv_heads * n_queries,
        lanes=batch * kv_heads,
        tokens=min(max_seqlen or most, most),
        in_fp32=q_sem.dtype == torch.float32,
    )


def plan(
    config: DecodeConfig,
    q_sem: Tensor,
    q_geo: Tensor,
    kinds: list[str],
    k_sem: list[Tensor],
    k_geo: list[Tensor],
    v: list[Tensor],
    n_packed: Tensor | None,
    null: list[Tensor],
    window: int,
) -> DecodePlan:
    """Plan calls of this signature with one config; without CUDA kernels, with the Triton config in its place."""
    if q_sem.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f"dba_decode: q_sem: got {q_sem.dtype}, expected float32, float16 or bfloat16 on a GPU"
        )
    asked, config = config, config.in_triton if config.in_cuda else config
    batch, heads, n_queries, width = q_sem.shape
    kv_heads = k_sem[-1].shape[1]
    group = heads // kv_heads
    v_width = v[-1].shape[-1] if v else width
    rows = batch * heads * n_queries
    final = config.n_splits == 1 and not null
    streams = [k_sem, k_geo, v or k_sem]
    modes = [
        mode(kind, d) for kind, d in zip([*kinds, kinds[0]], (width, q_geo.shape[-1], v_width), strict=False)
    ]
    quantised = [parts for parts in streams if len(parts) == 3]
    exact = [parts[0].shape[2] for parts in streams if len(parts) == 1]
    no_limit = 2**31 - 1
    early = supports_pdl(q_sem.device)
    # The splits signal their end wherever there is a combine, so that configs with and without PDL differ in that only.
    announced = early and not final
    joins_early = announced and asked.early_join
    row_blocks = ceil_div(group * n_queries, config.block_rows)
    dims = width, q_geo.shape[-1], v_width
    is_packed_math = config.packed_math and q_sem.dtype != torch.float32 and not INTERPRETED
    n_heads, by_latent = 0, False
    if (is_packed_math or INTERPRETED) and not any(
        s % 2 for parts in quantised for s in parts[0].stride()[:3]
    ):
        n_heads = heads_per_program(config, kinds, dims, kv_heads, group * n_queries)
        by_latent = is_latent_by_words(config, kinds, dims, kv_heads)
    queries = [q if q.stride(-1) == 1 else q.contiguous() for q in (q_sem, q_geo)]
    q_strides = [s for q in queries for s in q.stride()[:3]]
    strides = [
        *q_strides,
        *(s for parts in streams for s in parts[0].stride()[:3]),
        *(s for parts in streams for s in (parts[1].stride()[:3] if len(parts) == 3 else (0, 0, 0))),
        *(s for parts in streams for s in parts[-1].stride()[:3]),
        0 if n_packed is None or n_packed.shape[0] == 1 else n_packed.stride(0),
    ]
    capacities = [
        min((parts[0].shape[2] for parts in quantised), default=0),
        min((parts[2].shape[2] for parts in quantised), default=0),
        window,
    ]
    constants = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "QUERIES": n_queries,
        "HAS_WINDOW": window > 0,
        "FINAL": final,
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_TOKENS": config.block_tokens,
        "PACKED_MATH": is_packed_math,
    }
    options = {"num_warps": config.n_warps, "num_stages": config.n_stages, **pdl_options(early)}
    if config.n_registers:
        options["maxnreg"] = config.n_registers
    split: Launch | CudaLaunch
    if n_heads:
        by_words = [word_mode(kind, d, n_heads) for kind, d in zip(kinds, dims, strict=True)]
        split = Launch(
            decode_heads,
            (batch * (kv_heads // n_heads), config.n_splits),
            [*strides, *capacities],
            {
                **constants,
                "HEADS": n_heads,
                "SEM": by_words[0],
                "GEO": by_words[1],
                "V": by_words[2],
                "TAIL_TOKENS": min(TAIL_TOKENS, config.block_tokens),
                "ANNOUNCED": announced,
                "EARLY": early,
            },
            **options,
        )
    elif by_latent:
        sem, geo = (latent_mode(kind, d) for kind, d in zip(kinds, dims, strict=False))
        split = Launch(
            decode_latent,
            (batch * row_blocks, config.n_splits),
            [*strides, *capacities],
            {
                **{name: value for name, value in constants.items() if name != "KV_HEADS"},
                "ROW_BLOCKS": row_blocks,
                "SEM": sem,
                "GEO": geo,
                "TAIL_TOKENS": min(2 * TAIL_TOKENS, config.block_tokens),
                "ANNOUNCED": announced,
                "EARLY": early,
            },
            **options,
        )
    else:
        split = Launch(
            split_kv_kernel,
            (batch * kv_heads * row_blocks, config.n_splits),
            [*strides, min(exact, default=no_limit), *capacities],
            {
                **constants,
                "ROW_BLOCKS": row_blocks,
                "SEM": modes[0],
                "GEO": modes[1],
                "V": modes[2],
                "LATENT": not v,
                "HAS_PACKED": bool(quantised),
                "ANNOUNCED": announced,
                "EARLY": early,
            },
            **options,
        )
    if asked.in_cuda:
        given = [k_sem, k_geo, *([v] if v else [])]
        split = (
            split_launch(
                asked, kinds, queries, given, [*strides, *capacities],
                has_window=window > 0, final=final, announced=announced, early=early, otherwise=split,
            )
            or split
        )  # fmt: skip
    is_wide = rows >= MANY_ROWS and config.n_splits <= 16
    block = min(JOIN_FEATURES[is_wide], power_of_2(v_width))
    join = Launch(
        combine_kernel,
        (rows, ceil_div(v_width, block)),
        [*q_strides, config.n_splits],
        {
            "HEADS": heads,
            "GROUP": group,
            "QUERIES": n_queries,
            "DS": width,
            "DG": q_geo.shape[-1],
            "DV": v_width,
            "PS": power_of_2(width),
            "PG": power_of_2(q_geo.shape[-1]),
            "HAS_NULL": bool(null),
            "SPLITS": power_of_2(config.n_splits),
            "BLOCK": block,
            "EARLY": joins_early,
        },
        num_warps=4 if config.n_splits > 32 else 1,
        **pdl_options(joins_early),
    )
    numbers = rows * config.n_splits * v_width * q_sem.element_size()
    sums_from = ceil_div(numbers, ALIGNMENT) * ALIGNMENT
    sem, geo, values, nulls = _places([len(x) for x in (k_sem, k_geo, v, null)], n_packed)
    values = values or sem
    uneven = [place for place, q in enumerate((q_sem, q_geo)) if q.stride(-1) != 1]
    uneven += [place for place, row in zip(nulls, null, strict=True) if not row.is_contiguous()]
    # Numbers have no scales and are their own tail.
    parts_of = [(x[0], x[len(x) // 2], x[-1]) for x in (sem, geo, values)]
    return DecodePlan(
        copied=tuple(uneven),
        read=(0, 1, *(x[i] for i in range(3) for x in parts_of), 2, 2 if n_packed is None else 3),
        joined=(0, 1, *((nulls[0], nulls[1], nulls[2 if v else 0]) if null else (0, 1, 0))),
        out=(batch, heads, n_queries, v_width),
        strides=contiguous_strides((batch, heads, n_queries, v_width)),
        sum_strides=contiguous_strides((batch, heads, n_queries)),
        sums_from=sums_from,
        part_bytes=sums_from + rows * config.n_splits * 4,
        n_splits=config.n_splits,
        split=split,
        join=None if final else join,
        is_empty=not rows * v_width,
        joins_early=joins_early,
    )


def _places(counts: list[int], n_packed: Tensor | None) -> list[list[int]]:
    """Return where in `arguments` the tensors of each stream and of the null key are."""
    place = 3 if n_packed is None else 4
    found = []
    for count in counts:
        found.append(list(range(place, place + count)))
        place += count
    return found


def _capacity(parts: list[Tensor]) -> int:
    return parts[0].shape[2] + (parts[2].shape[2] if len(parts) == 3 else 0)


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up, see `power_of_2`."""
    return -(-a // b)


@functools.cache
def num_sms(device: torch.device) -> int:
    """Return how many programs a device runs side by side, at one a multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
