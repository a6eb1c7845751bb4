"""The CUDA kernel of decode attention on quantised heads against float64, in the emulator of a warp."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from caramba.ops.dba_decode import ZEROS
from tests.ops.decode_cases import Case, arguments, expected
from tests.ops.emulated import DESCENDING, EARLY, KERNELS, MODES, EmulatedKernel, needs_compiler

pytestmark = needs_compiler
heads = importlib.import_module("caramba.kernels.cuda.heads")
SMALL = heads.HeadsConfig(warps=2, stages=2)

# A form of kinds, heads, widths and queries is compiled once, which takes seconds: cases share it where they can.
CASES = {
    "mixed, ragged": Case(("q4_0", "q8_0", "q4_0"), (171, 0, 1, 90), (8, 2), packed=101),
    "q4_0, four heads": Case(("q4_0", "q4_0", "q4_0"), (130, 97), (16, 4), packed=97),
    "nf4, heads that share a block": Case(("nf4", "nf4", "nf4"), (150, 64), (16, 4), packed=128),
    "nf4, two heads": Case(("nf4", "q4_0", "nf4"), (99,), (4, 2), packed=70),
    "only a tail": Case(("q4_0", "q8_0", "q4_0"), (40, 3), (8, 2), packed=0),
    "no tail": Case(("nf4", "q4_0", "nf4"), (64,), (4, 2), packed=64),
    "several queries and a window": Case(
        ("q4_0", "q8_0", "q4_0"), (171, 100, 2), (4, 2), packed=128, queries=4, window=70
    ),
    "two queries of four heads": Case(("q8_0", "q8_0", "q4_0"), (140, 5), (8, 2), packed=100, queries=2),
    "window behind the blocks": Case(("q4_0", "q8_0", "q4_0"), (150,), (8, 2), packed=100, window=20),
    "other widths": Case(("q4_0", "q8_0", "q8_0"), (120,), (4, 2), dims=(32, 64, 32), packed=100),
    "wide": Case(("nf4", "q4_0", "q4_0"), (120,), (4, 2), dims=(64, 96, 128), packed=100),
    "one part": Case(("q8_0", ZEROS, "q8_0"), (171, 0, 1, 90), (8, 2), dims=(64, 16, 64), packed=101),
    "one part, wide, several queries": Case(
        ("q4_0", ZEROS, "q4_0"), (120, 30), (4, 2), dims=(128, 16, 128), packed=100, queries=3, window=70
    ),
    "seven queries of a head": Case(("q8_0", ZEROS, "q4_0"), (130,), (14, 2), dims=(64, 16, 64), packed=100),
    "one query of a head": Case(("nf4", "nf4", "nf4"), (99,), (4, 4), packed=70),
    "one part, a block to a head": Case(("nf4", ZEROS, "nf4"), (99,), (16, 4), dims=(64, 16, 64), packed=70),
}


def run(
    case: Case, way: Any, splits: int, dtype: torch.dtype, mode: int = 0, **changed: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what each split gives: outputs [B, H, T, splits, D] in float64 and logarithms to base 2 of its sums."""
    args, options = arguments(case, dtype)
    q, streams, seqlens = args[:2], [x.tensors for x in args[2:5]], args[5]
    for i, change in changed.items():
        change(streams) if i == "streams" else change(q)
    batch, n_heads, n_queries, _ = q[0].shape
    kv_heads = case.heads[1]
    final = splits == 1
    macros = heads.macros(
        case.kinds, case.dims, way, kv_heads=kv_heads, group=n_heads // kv_heads, queries=n_queries,
        has_window=case.window is not None, final=final, in_bf16=dtype == torch.bfloat16,
        tail_in_bf16=streams[0][2].dtype == torch.bfloat16, announced=True,
    )  # fmt: skip
    out = torch.full((batch, n_heads, n_queries, splits, case.dims[2]), torch.nan, dtype=dtype)
    sums = torch.full((batch, n_heads, n_queries, splits), torch.nan)
    # Zeros, of which nothing is read, stand for codes, scales and tail.
    streams = [x * 3 if len(x) == 1 else x for x in streams]
    tensors = [*q, *(x[i] for i in range(3) for x in streams), seqlens, options["n_packed"], out, sums]
    scalars = [s for x in q for s in x.stride()[:3]]
    scalars += [s for i in range(3) for x in streams for s in x[i].stride()[:3]]
    scalars += [0, min(x[0].shape[2] for x in streams), min(x[2].shape[2] for x in streams), case.window or 0]
    kernel = EmulatedKernel(KERNELS / "decode_heads.cu", "decode_heads", macros)
    held = [x.view(torch.int16).numpy() if x.dtype == torch.bfloat16 else x.numpy() for x in tensors]
    shared = heads.shared_bytes(case.kinds, case.dims, n_heads // kv_heads * n_queries, way)
    kernel((batch * kv_heads // 2, splits), 32 * way.warps, shared, [*held, *scalars], mode)
    if final:
        sums = sums / math.log(2)
    return out.double(), sums.double()


def joined(out: torch.Tensor, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Join splits; return outputs and natural logarithms of sums."""
    top = sums.amax(-1, keepdim=True).clamp_min(-1e30)
    weight = torch.exp2(sums - top)
    total = weight.sum(-1)
    found = (out * weight[..., None]).sum(-2) / total.clamp_min(1e-300)[..., None]
    return found, (top[..., 0] + total.log2()) * math.log(2)


def check(case: Case, way: Any, splits: int, dtype: torch.dtype, mode: int = 0, most: float = 4e-3) -> None:
    found, sums = joined(*run(case, way, splits, dtype, mode))
    wanted, wanted_sums = expected(case, *arguments(case, dtype))
    empty = wanted_sums.isinf()
    assert torch.equal(sums.isinf(), empty)
    assert (found[empty] == 0).all()
    assert not found.isnan().any()
    assert float((found - wanted).norm() / wanted.norm()) < most
    torch.testing.assert_close(sums[~empty], wanted_sums[~empty], rtol=0, atol=3e-3)


@pytest.mark.parametrize("name", CASES)
def test_is_what_float64_gives(name: str) -> None:
    check(CASES[name], SMALL, 3, torch.bfloat16)


@pytest.mark.parametrize("name", ["nf4, heads that share a block", "two queries of four heads"])
def test_one_split_writes_the_output_itself(name: str) -> None:
    check(CASES[name], SMALL, 1, torch.float16, most=1.5e-3)


@pytest.mark.parametrize("tabled", [0, 1, 2, 3])
@pytest.mark.parametrize("mode", [0, EARLY | DESCENDING])
def test_levels_come_from_permutations_or_from_a_table(tabled: int, mode: int) -> None:
    case = Case(("nf4", "nf4", "nf4"), (99, 40), (8, 4), packed=70)
    check(case, replace(SMALL, tabled=tabled), 2, torch.float16, mode, most=1.5e-3)


@pytest.mark.parametrize("mode", MODES)
def test_no_copy_or_meeting_of_lanes_is_missing(mode: int) -> None:
    check(CASES["mixed, ragged"], heads.HeadsConfig(warps=3, stages=3), 2, torch.bfloat16, mode)


@pytest.mark.parametrize("most", [(0.03, 0.03, 0.0), (0.0, 0.0, 0.07)], ids=("scores", "values"))
def test_what_grows_along_the_tokens_keeps_its_range(most: tuple[float, ...]) -> None:
    """Sums are made smaller again and again: neither weights nor their products with scales may leave float16."""
    case = replace(CASES["q4_0, four heads"], lengths=(230,), packed=200)

    def grow(streams: list[list[torch.Tensor]]) -> None:
        tokens = torch.arange(case.capacity)
        for stream, by in zip(streams, most, strict=True):
            stream[1].mul_(torch.exp2(tokens * by)[:, None].to(stream[1].dtype))

    out, sums = joined(*run(case, SMALL, 2, torch.bfloat16, streams=grow))
    args, options = arguments(case, torch.bfloat16)
    grow([stream.tensors for stream in args[2:5]])
    wanted, wanted_sums = expected(case, args, options)
    assert float((out - wanted).norm() / wanted.norm()) < 4e-3
    torch.testing.assert_close(sums, wanted_sums, rtol=1e-4, atol=3e-3)


def test_queries_beyond_float16_and_below_it() -> None:
    case = CASES["q4_0, four heads"]
    for by in (2.0**20, 2.0**-40):
        args, options = arguments(case, torch.bfloat16)
        args[:2] = [q * by for q in args[:2]]
        wanted, wanted_sums = expected(case, args, options)
        out, sums = joined(*run(case, SMALL, 2, torch.bfloat16, queries=lambda q, by=by: [x.mul_(by) for x in q]))
        assert float((out - wanted).norm() / wanted.norm()) < 4e-3
        torch.testing.assert_close(sums, wanted_sums, rtol=1e-5, atol=1e-3)
