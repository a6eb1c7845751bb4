"""Kernels that begin while the one ahead of them ends, as they are compiled for a GPU, which needs none."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest

from tests.unit.ops.compiled_kernel import compiled
from tests.unit.ops.kernel_device import INTERPRETS

pytestmark = pytest.mark.skipif(INTERPRETS, reason="the interpreter compiles nothing")
ACCESS = re.compile(r"griddepcontrol\.\w+|ld\.global(?:\.L1::evict_first)?|st\.global")
LAUNCH, WAIT = "griddepcontrol.launch_dependents", "griddepcontrol.wait"


def accesses(*, overlap: bool, rows: int) -> list[str]:
    """Return what row_linear's program does to memory, in order."""
    module = importlib.import_module("caramba.kernels.triton.row_linear")
    pointers = {name: "*bf16" for name in module._kernel.arg_names if name.endswith("_ptr")}
    constants: dict[str, Any] = {"ROWS": rows, "HAS_NORM": True, "GATED": True, "IS_WHOLE": True}
    constants |= {"BLOCK_N": 2, "BLOCK_K": 2048, "OVERLAP": overlap}
    types = pointers | {"n_out": "i32", "width": "i32", "eps": "fp32"}
    asm = compiled(module._kernel, types, constants, (*pointers, "n_out", "width"), num_warps=4)
    return ACCESS.findall(asm["ptx"])


@pytest.mark.parametrize("rows", [1, 2])
def test_weights_are_asked_for_ahead_of_the_wait_and_all_else_behind_it(rows: int) -> None:
    found = accesses(overlap=True, rows=rows)
    assert found.count(LAUNCH) == found.count(WAIT) == 1
    wait = found.index(WAIT)
    assert found[0] == LAUNCH
    ahead, behind = found[1:wait], found[wait + 1 :]
    # Weights are those read once; before the wait beside them: the norm's weight and the bias of gate and up.
    assert ahead.count("ld.global.L1::evict_first") == 8, "four rows, 16 bytes to a thread twice"
    assert "st.global" not in ahead
    assert "ld.global.L1::evict_first" not in behind
    assert behind.count("st.global") == rows, "a result to a row of x"


def test_without_it_nothing_waits() -> None:
    assert not {LAUNCH, WAIT} & set(accesses(overlap=False, rows=1))


@pytest.mark.parametrize("name", ["decode_split", "decode_join", "_append"])
def test_kernels_that_only_read_what_is_new_wait_first(name: str) -> None:
    """Of those the source says it: the wait stands before the first load."""
    home = "dba_append" if name == "_append" else "dba_decode_kernel"
    kernel = getattr(importlib.import_module(f"caramba.kernels.triton.{home}"), name)
    assert kernel.arg_names[-1] == "OVERLAP"
    body = kernel.src[kernel.src.index(")") :]
    assert 0 < body.index("gdc_wait()") < min(body.index("tl.load("), body.index("tl.program_id("))
