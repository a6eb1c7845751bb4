"""Plans of ways in CUDA C++: what they would launch on a GPU is launched in the emulator of a warp, with its arguments."""

from __future__ import annotations

import importlib
import math
import os
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.ops.decode_cases import Case, arguments, expected
from tests.ops.emulated import KERNELS, EmulatedKernel, needs_compiler

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="which has no ways in CUDA")
MIXED = ("q4_0", "q8_0", "q4_0")
HEADS = {"block_rows": 8, "block_tokens": 32, "n_warps": 2, "n_stages": 2, "n_heads": 2, "in_cuda": 1}
LATENT = {"block_rows": 16, "block_tokens": 32, "n_warps": 4, "n_stages": 1, "n_heads": 1, "in_cuda": 1}
CASES = {
    "heads": (Case(MIXED, (130, 40), heads=(8, 2), packed=101), HEADS),
    "heads, questions, window": (Case(MIXED, (130,), heads=(4, 2), packed=100, queries=3, window=60), HEADS),
    "heads, nf4 by a table": (
        Case(("q8_0", "q4_0", "nf4"), (99,), (4, 2), packed=70),
        {**HEADS, "variant": 2},
    ),
    "a latent": (Case(MIXED[:2], (149, 30), heads=(4, 1), dims=(128, 64, 128), packed=128), LATENT),
}


def module(name: str) -> ModuleType:
    return importlib.import_module(f"caramba.kernels.{name}")


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say that the CPU is a Hopper GPU with NVRTC."""
    decode = module("cuda.decode")
    monkeypatch.setattr(decode, "is_ready", lambda device: True)
    monkeypatch.setattr(decode, "is_hopper", lambda device: True)
    monkeypatch.setattr(decode, "most_shared", lambda device: 227 * 1024)


def planned(
    case: Case, way: dict[str, int], n_splits: int, dtype: torch.dtype
) -> tuple[Any, list[Any], dict[str, Any]]:
    args, options = arguments(case, dtype)
    parts = [*(stream.tensors for stream in args[2:5] if stream is not None), []][:3]
    config = module("triton.dba_decode_table").DecodeConfig(n_splits=n_splits, **way)
    plan = module("triton.dba_decode").plan
    made = plan(
        config,
        *args[:2],
        list(case.kinds),
        *parts,
        options["n_packed"],
        list(options.get("null", ())),
        case.window or 0,
    )
    return made, [*args[:2], parts, args[5]], options


def emulate(made: Any, given: list[Any], n_packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the splits of a plan; return outputs [rows, splits, width] and natural logarithms of sums in float64."""
    launch, (q_sem, q_geo, parts, seqlens) = made.split, given
    tensors = module("triton.dba_decode").arguments(q_sem, q_geo, *parts, seqlens, n_packed, [])
    read = [tensors[i] for i in made.read]
    rows = math.prod(made.out[:-1])
    out = torch.full((rows, made.n_splits, made.out[-1]), torch.nan, dtype=q_sem.dtype)
    sums = torch.full((rows, made.n_splits), torch.nan)
    config = launch.config
    kernel = EmulatedKernel(KERNELS / launch.source, launch.name, launch.macros)
    arrays = [x.view(torch.int16).numpy() if x.dtype == torch.bfloat16 else x.numpy() for x in (*read, out, sums)]
    kernel((config.grid_x, config.grid_y), config.block_x, config.shared_bytes, [*arrays, *launch.scalars])
    return out.double(), sums.double() * (1 if made.join is None else math.log(2))


@needs_compiler
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n_splits", [1, 3])
def test_what_is_launched_attends(name: str, n_splits: int) -> None:
    case, way = CASES[name]
    made, given, options = planned(case, way, n_splits, torch.bfloat16)
    assert type(made.split).__name__ == "CudaLaunch"
    assert (made.join is None) == (n_splits == 1)
    out, sums = emulate(made, given, options["n_packed"])
    total = sums.logsumexp(1)
    joined = ((sums - total[:, None]).exp().nan_to_num()[:, :, None] * out).sum(1)
    args, _ = arguments(case, torch.bfloat16)
    wanted, wanted_sums = expected(case, args, options)
    assert float((joined.reshape(wanted.shape) - wanted).norm() / wanted.norm()) < 8e-3
    torch.testing.assert_close(total.reshape(wanted_sums.shape), wanted_sums, rtol=2e-3, atol=5e-3)


@pytest.mark.parametrize(("arch", "is_early"), [("sm90", True), ("sm80", False)])
@pytest.mark.parametrize("name", ["heads", "a latent"])
def test_splits_begin_early_and_are_announced_where_devices_have_that(
    name: str, arch: str, is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("pdl", "dba_decode"):
        monkeypatch.setattr(module(f"triton.{part}"), "arch", lambda device: arch)
    made, _, _ = planned(*CASES[name], 3, torch.bfloat16)
    assert type(made.split).__name__ == "CudaLaunch"
    assert made.split.config.n_attributes == int(is_early)
    assert made.split.macros["ANNOUNCED"] == int(is_early)
    assert bool(made.join.options.get("launch_pdl")) == made.join.constants["EARLY"] == is_early
    made, _, _ = planned(*CASES[name], 1, torch.bfloat16)
    assert made.split.config.n_attributes == int(is_early)
    assert made.split.macros["ANNOUNCED"] == 0, "nothing joins one split"


def test_what_takes_its_place_is_a_launch_of_triton_with_as_many_splits() -> None:
    case, way = CASES["heads"]
    made, _, _ = planned(replace(case, heads=(16, 4)), way, 3, torch.bfloat16)
    other = made.split.otherwise
    assert (other.kernel.__name__, other.grid[1]) == ("decode_heads", made.n_splits)
    made, _, _ = planned(*CASES["a latent"], 3, torch.float16)
    assert (made.split.otherwise.kernel.__name__, made.split.features) == ("decode_latent", "")
    case, way = CASES["a latent"]
    assert planned(case, {**way, "variant": 1}, 3, torch.float16)[0].split.features == "a"


@pytest.mark.parametrize(
    ("changed", "dtype"),
    [
        ({}, torch.float32),
        ({"kinds": ("q4_0", "bf16", "q4_0")}, torch.bfloat16),
        ({"heads": (6, 3)}, torch.bfloat16),
        ({"heads": (24, 2)}, torch.bfloat16),
        ({"capacity": 252}, torch.bfloat16),
        ({"dims": (24, 32, 64)}, torch.bfloat16),
    ],
    ids=("float32", "numbers", "odd heads", "many rows", "scales beside chunks", "half a step"),
)
def test_what_cannot_be_read_in_cuda_is_read_in_triton(changed: dict[str, Any], dtype: torch.dtype) -> None:
    case, way = CASES["heads"]
    made, _, _ = planned(replace(case, **changed), way, 3, dtype)
    assert type(made.split).__name__ == "Launch"
    assert made.split.grid[1] == 3


def test_the_only_row_of_scales_is_read_by_whole_chunks() -> None:
    case = Case(("nf4", "nf4"), (149,), heads=(4, 1), dims=(64, 64, 64), packed=128)
    for capacity, launch in ((256, "CudaLaunch"), (250, "Launch")):
        made, _, _ = planned(replace(case, capacity=capacity), LATENT, 3, torch.bfloat16)
        assert type(made.split).__name__ == launch


def test_without_a_compiler_or_room_triton_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("is_ready", False), ("most_shared", 16 * 1024)):
        with monkeypatch.context() as patch:
            patch.setattr(module("cuda.decode"), name, lambda device, value=value: value)
            assert type(planned(*CASES["heads"], 3, torch.bfloat16)[0].split).__name__ == "Launch"
