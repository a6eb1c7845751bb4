"""Launcher of `caramba::dba_decode`: what calls of one form launch, and how each stream is read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from caramba.kernels.cuda.decode import is_ready, split_launch
from caramba.kernels.cuda.launch import CudaLaunch
from caramba.kernels.triton.dba_decode_heads import FIELDS, decode_heads
from caramba.kernels.triton.dba_decode_kernel import combine_kernel, split_kv_kernel
from caramba.kernels.triton.dba_decode_latent import decode_latent
from caramba.kernels.triton.dba_decode_table import DecodeConfig, DecodeShape, choose
from caramba.kernels.triton.launch import (
    ALIGNMENT,
    INTERPRETED,
    Launch,
    arch,
    contiguous_strides,
    empty,
    misaligned_args,
    power_of_2,
    stream_of,
)
from caramba.kernels.triton.pdl import pdl_options, supports_pdl
from caramba.kernels.triton.signature import LaunchCache
from torch import Tensor

JOIN_FEATURES = 32, 128
"""Features of a program that combines splits: few, so that a step's few rows keep a device busy, and from MANY_ROWS on
most, so that not thousands of programs are launched. They are in the registers of one warp."""
MANY_ROWS = 512
TAIL_TOKENS = 32
"""Tokens of a tile of tails, which are few: what is read word by word takes registers."""
Shape = tuple[int, ...]
BLOCK_ELEMENTS = {"q8_0": 32, "q4_0": 32, "nf4": 64}
LEAST_WORDS = 16
"""Features that a product of keys has at least."""

WordMode = tuple[str, int, int, int, int, int, int, int]
"""KIND, D, WORDS, E, PHASES, PER_BLOCK, HEADS, FIELDS of a stream, see `dba_decode_heads`."""
Mode = tuple[str, int, int, int, int, bool, bool]
"""KIND, D, P, E, SPREAD, HALVED, UNIFORM of a stream, see `dba_decode_kernel`."""
Op = Callable[..., tuple[Tensor, Tensor]]
plans: LaunchCache[Any] = LaunchCache()
"""What calls of a form run: a `DecodePlan`, what another op makes of one, or an op in its place."""


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
    admit: Callable[..., Op | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the op with the table's config for these shapes; `n_splits` overrides its splits.

    What is decided by the form of the arguments (how the work is cut, say) is decided once for each form. `admit` is
    called with the arguments first when their form is a new one: it refuses them, or returns what is to run in place
    of the kernel, or None. The hint of a length counts as the power of two above it, or every step would be a new form.
    """
    hint = power_of_2(max_seqlen) if max_seqlen > 0 else max_seqlen
    tensors = arguments(q_sem, q_geo, k_sem, k_geo, v, seqlens, n_packed, null)
    rest = (*kinds, len(k_sem), len(k_geo), len(v), n_packed is None, len(null), window, hint, n_splits)
    found = plans.get(rest, tensors)
    if found is None:
        given = (q_sem, q_geo, kinds, k_sem, k_geo, v, seqlens, n_packed, null, window, max_seqlen, n_splits)
        found = None if admit is None else admit(*given)
        if found is None:
            found = chosen(q_sem, q_geo, kinds, k_sem, k_geo, v, n_packed, null, window, hint, n_splits)
        plans.add(rest, tensors, found)
    if not isinstance(found, DecodePlan):
        return found(q_sem, q_geo, kinds, k_sem, k_geo, v, seqlens, n_packed, null, window, max_seqlen, n_splits)
    return run(found, tensors)


def forget_plans() -> None:
    """Discard all plans, as after the table has changed."""
    plans.clear()


def chosen(
    q_sem: Tensor,
    q_geo: Tensor,
    kinds: list[str],
    k_sem: list[Tensor],
    k_geo: list[Tensor],
    v: list[Tensor],
    n_packed: Tensor | None,
    null: list[Tensor],
    window: int,
    hint: int,
    n_splits: int,
) -> DecodePlan:
    """Plan calls of this signature with the table's config."""
    shape = decode_shape(q_sem, q_geo, kinds, k_sem, k_geo, v, hint)
    in_cuda = is_ready(q_sem.device) and (not v or k_sem[-1].shape[1] % 2 == 0)  # heads are read in pairs
    config = choose(shape, num_sms(q_sem.device), in_cuda)
    config = replace(config, n_splits=n_splits) if n_splits else config
    return plan(config, q_sem, q_geo, kinds, k_sem, k_geo, v, n_packed, null, window)


def launch(
    config: DecodeConfig,
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
) -> tuple[Tensor, Tensor]:
    """Run the op with one config. Only shapes decide, so the call does not synchronise with the device."""
    made = plan(config, q_sem, q_geo, kinds, k_sem, k_geo, v, n_packed, null, window)
    return run(made, arguments(q_sem, q_geo, k_sem, k_geo, v, seqlens, n_packed, null))


def run(plan: DecodePlan, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Run the op as planned for `arguments` of this form."""
    q_sem = tensors[0]
    stream = stream_of(q_sem)
    out = empty(q_sem, stream, plan.out, plan.strides, q_sem.dtype)
    sums = empty(q_sem, stream, plan.out[:-1], plan.sum_strides, torch.float32)
    if plan.is_empty:
        return out, sums
    tensors = _laid_out(plan, tensors)
    places = [x.data_ptr() for x in tensors]
    together = 0
    for place in places:
        together |= place
    # What is allocated is aligned.
    is_even = not together % ALIGNMENT
    read, ends = [places[i] for i in plan.read], (out.data_ptr(), sums.data_ptr())
    if plan.join is None:
        read += ends
        if stream is None or not plan.split.at(stream, 0 if is_even else misaligned_args(read), read):
            plan.split(*(tensors[i] for i in plan.read), out, sums)
        return out, sums
    # One for both, of which a compiled kernel needs no views.
    parts = empty(q_sem, stream, (plan.part_bytes,), (1,), torch.uint8)
    start = parts.data_ptr()
    parted = start, start + plan.sums_from
    read += parted
    if stream is None or not plan.split.at(stream, 0 if is_even else misaligned_args(read), read):
        plan.split(*(tensors[i] for i in plan.read), *_views(plan, parts, q_sem.dtype))
    joined = [*parted, *[places[i] for i in plan.joined], *ends]
    if stream is None or not plan.join.at(stream, 0 if is_even else misaligned_args(joined), joined):
        views = _views(plan, parts, q_sem.dtype)
        plan.join(*views, *(tensors[i] for i in plan.joined), out, sums)
    return out, sums


def run_splits(plan: DecodePlan, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Let every split of a plan with a join attend, as `run` does.

    Return what they attended, and the logarithms to base 2 of their sums of exponentials, fp32, each row's splits side
    by side.
    """
    tensors = _laid_out(plan, tensors)
    q_sem = tensors[0]
    parts = empty(q_sem, stream_of(q_sem), (plan.part_bytes,), (1,), torch.uint8)
    views = _views(plan, parts, q_sem.dtype)
    plan.split(*(tensors[i] for i in plan.read), *views)
    return views


def _laid_out(plan: DecodePlan, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the tensors as a plan's kernels read them."""
    if not plan.copied:
        return tensors
    return [x.contiguous() if i in plan.copied else x for i, x in enumerate(tensors)]


def _views(plan: DecodePlan, parts: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return what the splits attended and their sums, as tensors: a kernel is compiled for their dtypes."""
    return parts[: plan.sums_from].view(dtype), parts[plan.sums_from :].view(torch.float32)


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
        raise ValueError(f"dba_decode: q_sem: got {q_sem.dtype}, expected float32, float16 or bfloat16 on a GPU")
    asked, config = config, config.in_triton if config.in_cuda else config
    batch, heads, n_queries, width = q_sem.shape
    kv_heads = k_sem[-1].shape[1]
    group = heads // kv_heads
    v_width = v[-1].shape[-1] if v else width
    rows = batch * heads * n_queries
    final = config.n_splits == 1 and not null
    streams = [k_sem, k_geo, v or k_sem]
    modes = [mode(kind, d) for kind, d in zip([*kinds, kinds[0]], (width, q_geo.shape[-1], v_width), strict=False)]
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
    if (is_packed_math or INTERPRETED) and not any(s % 2 for parts in quantised for s in parts[0].stride()[:3]):
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


@functools.cache
def mode(kind: str, width: int) -> Mode:
    """Return how a stream of this format and width per head is read.

    SPREAD is the number of scales of a head's token: one where a head is in one block, one for each block where
    it is whole blocks, and 0 where neither holds and every element looks its own up.
    """
    padded = max(16, power_of_2(width))
    elements = BLOCK_ELEMENTS.get(kind)
    if elements is None:
        return "exact", width, padded, 32, 0, False, False
    half = elements if kind == "q8_0" else elements // 2
    spread = 1 if elements % width == 0 else padded // elements if width % elements == 0 else 0
    halved = kind != "q8_0" and width % elements == 0 and padded >= 32
    return kind, width, padded, elements, spread, halved, half % width == 0


def heads_per_program(
    config: DecodeConfig, kinds: list[str], dims: tuple[int, int, int], kv_heads: int, rows: int
) -> int:
    """Return how many key/value heads of `rows` queries each a program reads by words, at most the config's.

    It is 0 where that is 0 and where they cannot be read so: all streams have to be quantised, heads to be whole blocks or
    even parts of one, and a phase to have words enough for a product.
    """
    n_heads = config.n_heads
    while n_heads and not (
        len(kinds) == 3
        and all(kind in BLOCK_ELEMENTS for kind in kinds)
        and kv_heads % n_heads == 0
        and n_heads * rows <= config.block_rows
        and all(_has_words(kind, d, n_heads) for kind, d in zip(kinds, dims, strict=True))
    ):
        n_heads //= 2
    return n_heads


def _has_words(kind: str, width: int, n_heads: int) -> bool:
    elements = BLOCK_ELEMENTS[kind]
    if (elements % width and width % elements) or n_heads * width % elements:
        return False
    return word_mode(kind, width, n_heads)[2] >= LEAST_WORDS


@functools.cache
def word_mode(kind: str, width: int, n_heads: int) -> WordMode:
    """Return how `n_heads` heads of this width are read by words of 16 bits, see `dba_decode_heads`."""
    elements = BLOCK_ELEMENTS[kind]
    phases = max(1, width // elements)
    blocks = n_heads * width // elements // phases
    per_block = elements // FIELDS[kind]
    return kind, width, blocks * per_block, elements, phases, per_block, n_heads, FIELDS[kind]


def is_latent_by_words(config: DecodeConfig, kinds: list[str], dims: tuple[int, int, int], kv_heads: int) -> bool:
    """Whether a choice reads a latent by words, and it can be: two quantised streams of whole blocks, of powers of two that
    leave each product words enough."""
    return (
        config.n_heads > 0
        and len(kinds) == 2
        and kv_heads == 1
        and all(
            kind in FIELDS and d == power_of_2(d) and d % BLOCK_ELEMENTS[kind] == 0 and d // FIELDS[kind] >= LEAST_WORDS
            for kind, d in zip(kinds, dims, strict=False)
        )
    )


@functools.cache
def latent_mode(kind: str, width: int) -> WordMode:
    """Return how a latent's stream is read by words of 16 bits, all of its blocks at once, see `dba_decode_latent`."""
    elements, fields = BLOCK_ELEMENTS[kind], FIELDS[kind]
    return kind, width, width // fields, elements, 1, elements // fields, 1, fields
