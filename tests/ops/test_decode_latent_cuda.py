"""Decode attention on quantised latents in CUDA C++, emulated on this host, against float64."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops.decode_cases import Case, arguments, expected
from tests.ops.emulated import EARLY, KERNELS, MODES, EmulatedKernel, needs_compiler

latent = importlib.import_module("caramba.kernels.cuda.latent")
pytestmark = needs_compiler
MIXED = ("q4_0", "q8_0")
SMALL = Case(MIXED, (149,), heads=(4, 1), dims=(128, 64, 128), packed=128)
QUICK = latent.LatentConfig(rows=16, warps=4, stages=(1, 1))


def bits(x: Tensor) -> np.ndarray:
    return x.contiguous().view(torch.int16).numpy()


def attend(
    case: Case,
    way: Any,
    n_splits: int,
    dtype: torch.dtype = torch.bfloat16,
    mode: int = 0,
    by: float = 1.0,
    growth: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return output and sums of the emulated splits, joined in float64, and what is expected of them.

    Queries are multiplied `by` a number, and blocks by one that grows along the tokens.
    """
    args, options = arguments(case, dtype)
    args[:2] = [q * by for q in args[:2]]
    for stream in args[2:4]:
        stream.scales.mul_(1 + growth * torch.arange(case.capacity)[:, None])
    q_sem, q_geo, sem, geo, _, seqlens = args
    batch, heads, n_queries, width = q_sem.shape
    final = n_splits == 1
    macros = latent.macros(
        case.kinds, case.dims, way, group=heads, queries=n_queries, has_window=case.window is not None,
        final=final, in_bf16=dtype == torch.bfloat16, announced=True,
    )  # fmt: skip
    kernel = EmulatedKernel(KERNELS / "decode_latent.cu", "decode_latent", macros)
    rows = batch * heads * n_queries
    out = torch.full((rows, n_splits, width), torch.nan, dtype=dtype)
    sums = torch.full((rows, n_splits), torch.nan)
    code, scale, tail = ([x.tensors[i] for x in (sem, geo, sem)] for i in range(3))
    packed = options["n_packed"]
    strides = [
        *(s for q in (q_sem, q_geo) for s in q.stride()[:3]),
        *(s for part in (code, scale, tail) for x in part for s in x.stride()[:3]),
        0,
    ]
    scalars = [*strides, case.capacity, case.tail, case.window or 0]
    kept = (bits(out), sums.numpy())
    kernel(
        (batch * -(-heads * n_queries // way.rows), n_splits), 32 * way.warps, macros["SHARED_BYTES"],
        [bits(q_sem), bits(q_geo), *(x.numpy() for x in (*code, *scale)), *(bits(x) for x in tail), seqlens.numpy(),
         packed.numpy(), *kept, *scalars], mode,
    )  # fmt: skip
    parts, logs = out.double(), sums.double() * (1 if final else math.log(2))
    total = logs.logsumexp(1)
    weights = (logs - total[:, None]).exp().nan_to_num()  # of rows that see nothing, nothing
    joined = (parts * weights[:, :, None]).sum(1)
    wanted, wanted_sums = expected(case, args, options)
    shape = batch, heads, n_queries
    return joined.reshape(*shape, width), total.reshape(shape), wanted, wanted_sums


def check(case: Case, way: Any, n_splits: int, **options: Any) -> None:
    """Compare the splits with what is expected; levels of nf4 are a byte."""
    out, sums, wanted, wanted_sums = attend(case, way, n_splits, **options)
    assert (out - wanted).norm() <= (1.6e-2 if "nf4" in case.kinds else 6e-3) * wanted.norm()
    torch.testing.assert_close(sums, wanted_sums, rtol=2e-3, atol=1e-2 if "nf4" in case.kinds else 4e-3)


# Each form is compiled for seconds. Formats that stand here once are those of `test_widths` too.
@pytest.mark.parametrize(
    ("kinds", "grouped"),
    [
        (MIXED, True),
        (("nf4", "q8_0"), True),
        (("q8_0", "q8_0"), False),
        (("q4_0", "q4_0"), False),
        (("nf4", "nf4"), False),
    ],
)
def test_every_format_is_read(kinds: tuple[str, str], grouped: bool) -> None:
    check(replace(SMALL, kinds=kinds), replace(QUICK, grouped=grouped), n_splits=3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("stages", "warps"), [((1, 1), 4), ((2, 2), 8), ((1, 2), 8), ((3, 1), 4)])
def test_tiles_are_held_in_any_number(stages: tuple[int, int], warps: int, mode: int) -> None:
    """Seventeen tiles for four or eight warps, which begin and end in the middle of their stages."""
    way = replace(QUICK, stages=stages, warps=warps)
    check(replace(SMALL, lengths=(551,), packed=537, capacity=1024), way, n_splits=1, mode=mode)


@pytest.mark.parametrize(
    ("dims", "kind"),
    [
        ((128, 256, 128), "q4_0"),
        ((128, 256, 128), "nf4"),
        ((64, 64, 64), "q8_0"),
        ((64, 64, 64), "nf4"),
        ((64, 128, 64), "q4_0"),
        ((64, 128, 64), "q8_0"),
    ],
)
def test_widths(dims: tuple[int, int, int], kind: str) -> None:
    check(replace(SMALL, kinds=(kind, kind), dims=dims, lengths=(85,), packed=64), QUICK, n_splits=2)


@pytest.mark.parametrize(
    ("kinds", "dims"),
    [
        (("q8_0", "q8_0"), (128, 192)),
        (("q8_0", "q8_0"), (192, 256)),
        (MIXED, (64, 192)),
        (("q4_0", "q4_0"), (256, 384)),
    ],
)
def test_tails_of_widths_that_are_no_multiple_of_what_is_staged(kinds: tuple[str, str], dims: tuple[int, int]) -> None:
    case = replace(SMALL, kinds=kinds, dims=(*dims, dims[0]), lengths=(85,), packed=64)
    assert latent.fits(kinds, dims, QUICK)
    check(case, QUICK, n_splits=2)


@pytest.mark.parametrize(("packed", "n_splits"), [(32, 1), (160, 1), (161, 2), (280, 2), (0, 1)])
def test_warps_that_multiply_together_go_without_a_tile(packed: int, n_splits: int) -> None:
    way = replace(QUICK, stages=(2, 1))
    check(replace(SMALL, lengths=(packed + 3,), packed=packed, capacity=512), way, n_splits)


@pytest.mark.parametrize(("heads", "rows", "warps"), [(32, 32, 4), (20, 32, 12), (32, 16, 8), (5, 16, 16)])
def test_rows_of_a_block(heads: int, rows: int, warps: int) -> None:
    """As many as it has, fewer, and more than one block of them; also in warps that lay out a row of queries each, or none."""
    check(replace(SMALL, heads=(heads, 1)), replace(QUICK, rows=rows, warps=warps), n_splits=2)


@pytest.mark.parametrize("lengths", [(0, 1, 70), (128, 129, 200), (1, 0, 0)])
@pytest.mark.parametrize("apart", [False, True])
def test_sequences_of_a_batch_end_where_they_end(lengths: tuple[int, ...], apart: bool) -> None:
    packed = 64 if max(lengths) > 64 else 0
    check(replace(SMALL, lengths=lengths, packed=packed, tail=144), replace(QUICK, tail_apart=apart), n_splits=3)


@pytest.mark.parametrize(("n_queries", "window"), [(2, None), (8, 1), (8, 40)])
def test_queries_see_what_came_before_them(n_queries: int, window: int | None) -> None:
    """Of a sequence shorter than they are, too, whose first queries see nothing; of one whose blocks some do not see."""
    case = replace(SMALL, lengths=(133, 5, 98), packed=96, queries=n_queries, window=window)
    check(case, replace(QUICK, rows=32), n_splits=3)
    check(replace(case, packed=0, tail=144), QUICK, n_splits=1)


def test_queries_far_beyond_float16() -> None:
    """Products of float16 queries would be infinite or nothing; the softmax is that of the largest score."""
    for factor in (2.0**24, 2.0**-30):
        case = replace(SMALL, lengths=(40,), packed=32)
        out, sums, wanted, _ = attend(case, QUICK, 1, by=factor)
        assert sums.isfinite().all()
        assert (out - wanted).norm() <= 1e-2 * wanted.norm(), factor


@pytest.mark.parametrize("n_splits", [2, 5])
def test_the_number_of_splits_changes_little(n_splits: int) -> None:
    one = attend(SMALL, QUICK, 1, dtype=torch.float16)
    other = attend(SMALL, QUICK, n_splits, dtype=torch.float16, mode=EARLY)
    torch.testing.assert_close(other[0], one[0], rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(other[1], one[1], rtol=1e-4, atol=1e-4)


def test_weights_that_rise_from_tile_to_tile() -> None:
    """Keys that grow along the tokens raise the maximum again and again, by less than is put off and by more."""
    case = replace(SMALL, lengths=(250,), packed=224, capacity=256)
    check(case, QUICK, 1, growth=0.05)


def test_scales_of_nf4_beyond_float16_count_as_its_largest() -> None:
    """Nothing is infinite or NaN; scales that float16 holds are right as far as it."""
    case = replace(SMALL, kinds=("nf4", "nf4"), lengths=(40,), packed=40)
    out, sums, _, _ = attend(case, QUICK, 1, growth=1e6)
    assert out.isfinite().all()
    assert sums.isfinite().all()
    out, _, wanted, _ = attend(case, QUICK, 1, growth=500)
    assert (out - wanted).norm() <= 1.6e-2 * wanted.norm()


def test_forms_that_can_be_read() -> None:
    way = latent.LatentConfig()
    assert latent.fits(MIXED, (128, 256), way)
    assert not latent.fits(MIXED, (512, 64), replace(way, warps=12, stages=(1, 1))), "more sums than registers"
    assert latent.fits(MIXED, (256, 64), way)
    assert not latent.fits(MIXED, (256, 64), replace(way, warps=12, stages=(1, 1)))
    assert not latent.fits(MIXED, (128, 64), replace(way, rows=64)), "more rows than columns of a product"
    assert not latent.fits(MIXED, (128, 0), way)
    assert not latent.fits(MIXED, (128, 256), replace(way, warps=6)), "no whole teams"
    assert not latent.fits(("q4_0", "q4_0"), (128, 96), way), "three chunks for four lanes"
    assert not latent.fits(("q8_0", "q8_0"), (32, 64), way), "fewer products than warps of a team"
    assert not latent.fits(("bf16", "q8_0"), (128, 64), way)


def test_fewer_tiles_of_the_latent_are_held_where_shared_memory_is_full() -> None:
    for kinds, warps, stages in ((MIXED, 8, (2, 2)), (("q8_0", "q8_0"), 8, (1, 2)), (MIXED, 12, (2, 1))):
        way = latent.LatentConfig(warps=warps, stages=(2, stages[1]))
        made = latent.macros(kinds, (128, 256), way, group=32, queries=1, has_window=False, final=False, in_bf16=True)
        assert (made["SEM_STAGES"], made["GEO_STAGES"]) == stages
        assert made["SHARED_BYTES"] == latent.shared_bytes(kinds, (128, 256), way) <= latent.MOST_SHARED
    assert not latent.fits(("q8_0", "q8_0"), (128, 512), latent.LatentConfig())
    assert not latent.fits(MIXED, (128, 256), latent.LatentConfig(blocks=2))
