"""Every Triton kernel compiles for Hopper as its launcher launches it, in all that a GPU sees of dtypes and formats.

No GPU is needed, and none is used: what a kernel computes is tested elsewhere. That it compiles has to be tested with the
arguments of the launch, of which some are None, are 1 or divide by 16: each of these is another kernel.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

from caramba.kernels import find_launcher
from caramba.ops.backend import all_ops
from tests.ops.decoding_cases import stream
from tests.ops.hopper import PROCESSORS, SHARED_BYTES, hopper, module
from tests.ops.kernel_cases import CASES
from tests.ops.launcher_case import Case, one

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
pytest.importorskip("triton")


SAME = {"decode_heads": "split_kv_kernel", "decode_latent": "split_kv_kernel"}
"""Kernels that do what another does, as the table says."""


def launcher(op: str) -> Any:
    return find_launcher(all_ops()[op], "triton")


def told(error: BaseException | None) -> str:
    """The messages of an error and of what it came of: Triton's own names only the line."""
    lines = []
    while error is not None:
        lines.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return "\n".join(lines)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles_as_it_is_launched(case: Case) -> None:
    launch, arguments = launcher(case.op), case.arguments()
    with hopper() as made:
        try:
            launch(*arguments)
        except Exception as error:
            pytest.fail(f"{case.op} ({case.name}) does not compile for sm_90:\n{told(error)}", pytrace=False)
    assert tuple(SAME.get(name, name) for name, _ in made) == case.kernels, "launched"
    for name, kernel in made:
        where = f"{case.op} ({case.name}): {name}"
        ptx = kernel.asm["ptx"]
        assert f".entry {name}(" in ptx, where
        assert ".target sm_90" in ptx, where
        assert kernel.asm["cubin"].startswith(b"\x7fELF"), where
        shared = kernel.metadata.shared
        assert shared <= SHARED_BYTES, f"{where} needs {shared} bytes of shared memory of {SHARED_BYTES}"


CUDNN = {"prefix_attention", "prefix_attention_backward"}
"""Ops whose launcher calls cuDNN through ATen: there is no kernel of ours to compile."""


def test_every_launcher_has_a_case() -> None:
    assert sorted(set(all_ops()) - {case.op for case in CASES} - CUDNN) == [], "in tests/ops/kernel_cases.py"


def test_heads_together_compile_and_need_the_shared_memory_that_the_table_counts_on() -> None:
    kinds = ("q4_0", "q8_0", "nf4")
    table = module("dba_decode_table")
    q = [one(2, 32, 1, width) for width in (16, 32)]
    parts = [stream(kind, width, 2, 8, 512, 96) for kind, width in zip(kinds, (16, 32, 64), strict=True)]
    config = table.DecodeConfig(block_tokens=64, n_splits=2, n_registers=168, n_heads=4)
    lengths, packed = one(2, dtype=torch.int32), one(1, dtype=torch.int32)
    with hopper() as made:
        module("dba_decode").launch(config, *q, list(kinds), *parts, lengths, packed, [], 64)
        shape = module("dba_decode").decode_shape(*q, list(kinds), *parts, 512)
    name, kernel = made[0]
    assert name == "decode_heads"
    assert kernel.asm["cubin"].startswith(b"\x7fELF")
    assert kernel.metadata.shared <= table.shared_bytes(shape, config) + table.LEEWAY


@pytest.mark.parametrize(
    ("kinds", "dims", "reading"),
    [
        (("q4_0", "q8_0"), (128, 256, 128), {"block_rows": 32, "n_registers": 168}),
        (("q8_0", "nf4"), (128, 64, 128), {"block_rows": 32, "n_warps": 2}),
        (("nf4", "q4_0"), (64, 128, 64), {"block_tokens": 128, "n_stages": 2}),
    ],
    ids=("mixed, wide", "q8_0 and nf4", "nf4 and q4_0, one tile of rows"),
)
def test_a_latent_by_words_compiles_and_needs_the_shared_memory_that_the_table_counts_on(
    kinds: tuple[str, str], dims: tuple[int, int, int], reading: dict[str, int]
) -> None:
    table = module("dba_decode_table")
    q = [one(2, 32, 1, width) for width in dims[:2]]
    parts = [stream(kind, width, 2, 1, 512, 96) for kind, width in zip(kinds, dims, strict=False)]
    config = table.DecodeConfig(n_splits=2, n_heads=1, **reading)
    lengths, packed = one(2, dtype=torch.int32), one(1, dtype=torch.int32)
    with hopper() as made:
        module("dba_decode").launch(config, *q, list(kinds), *parts, [], lengths, packed, [], 0)
        shape = module("dba_decode").decode_shape(*q, list(kinds), *parts, [], 512)
    name, kernel = made[0]
    assert name == "decode_latent"
    assert kernel.asm["cubin"].startswith(b"\x7fELF")
    assert kernel.metadata.shared <= table.shared_bytes(shape, config) + table.LEEWAY


@pytest.mark.parametrize("case", [case for case in CASES if case.op == "dba_decode"], ids=str)
def test_decode_attention_needs_the_shared_memory_that_its_table_counts_on(case: Case) -> None:
    arguments = case.arguments()
    with hopper() as made:
        launcher(case.op)(*arguments)
        shape = module("dba_decode").decode_shape(*arguments[:6], arguments[10])
    table = module("dba_decode_table")
    way = table.choose(shape, PROCESSORS, in_cuda=False)  # no device that is there can have those
    counted = table.shared_bytes(shape, way.in_triton if way.in_cuda else way)
    assert made[0][0] in ("split_kv_kernel", "decode_heads", "decode_latent")
    assert made[0][1].metadata.shared <= counted + table.LEEWAY


def waits_first(kernel: Any) -> bool:
    """Whether a kernel is launched before the one ahead has ended, and touches no memory until that has."""
    before, wait, _ = kernel.asm["ptx"].partition("griddepcontrol.wait")
    touches = re.search(r"\b(ld|st|atom|red)\.(relaxed\.|acquire\.)?global|cp\.async", before)
    return kernel.metadata.launch_pdl and bool(wait) and touches is None


@pytest.mark.parametrize(
    ("name", "reading"),
    [
        ("bf16", {"block_tokens": 16}),
        ("q8_0", {"block_rows": 16, "block_tokens": 32, "n_heads": 4}),
        ("latent q4_0 and q8_0", {"block_rows": 32, "block_tokens": 32, "n_heads": 1}),
    ],
)
def test_splits_and_their_join_begin_early_and_wait_before_they_read(name: str, reading: dict[str, int]) -> None:
    case = next(case for case in CASES if case.op == "dba_decode" and case.name == name)
    arguments = case.arguments()
    way = module("dba_decode_table").DecodeConfig(n_splits=4, **reading)
    with hopper() as made:
        module("dba_decode").launch(way, *arguments[:10])
    (_, split), (_, join) = made
    assert split.asm["ptx"].count("griddepcontrol.launch_dependents") == 1
    assert waits_first(split)
    assert waits_first(join)


@pytest.mark.parametrize("op", ["small_batch_linear", "absorbed_step"])
def test_the_products_of_one_row_begin_early_and_wait_before_they_read(op: str) -> None:
    case = next(case for case in CASES if case.op == op)
    with hopper() as made:
        launcher(op)(*case.arguments())
    assert [waits_first(kernel) for _, kernel in made] == [True]


@pytest.mark.parametrize("name", ["bf16, one row", "bf16, one row, more splits"])
def test_what_joins_and_maps_early_reads_the_map_and_waits_for_splits(name: str) -> None:
    case = next(case for case in CASES if case.op == "dba_decode_up" and case.name == name)
    *given, up, window, _, n_splits = case.arguments()
    decode = plans = module("dba_decode")
    way = module("dba_decode_table").DecodeConfig(block_tokens=16, n_splits=n_splits)
    q, (lengths, packed) = given[0], given[-2:]
    with hopper() as made:
        plan = plans.plan(way, *given[:5], [], packed, [], window)
        finish = module("dba_decode_up").plan_up(plan, q, up).finish
        tensors = plans.arguments(*given[:2], *given[3:5], [], lengths, packed, [])
        finish(*decode.run_splits(plan, tensors), up, q.new_empty((1, 1, 32, up.shape[-1])))
    _, (joined, kernel) = made
    assert (joined, kernel.metadata.launch_pdl) == (case.kernels[1], True)
    before, after = kernel.asm["ptx"].split("griddepcontrol.wait")
    assert "ld.global" in before
    assert "ld.global" in after
