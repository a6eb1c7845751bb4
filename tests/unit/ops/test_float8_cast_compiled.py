"""The Triton kernel of float8 casts as it is compiled for a GPU, which needs none."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest

from tests.unit.ops.compiled_kernel import compiled
from tests.unit.ops.kernel_device import INTERPRETS

pytestmark = pytest.mark.skipif(INTERPRETS, reason="the interpreter compiles nothing")


def test_rows_and_columns_of_one_scale_have_casts_of_their_own() -> None:
    """What ptxas makes of a cast that is packed for rows and taken apart for columns is wrong: see the kernel."""
    pytest.importorskip("triton")  # which the kernel's module needs
    module = importlib.import_module("caramba.kernels.triton.float8_cast")
    kernel, (block_m, block_n) = module._cast_kernel, module.CAST[module.SWIGLU]
    pointers = {name: "*fp32" for name in kernel.arg_names if name.endswith("_ptr")}
    pointers |= {"x_ptr": "*bf16", "amax_ptr": "*i32", "rows_ptr": "*fp8e4nv", "columns_ptr": "*fp8e4nv"}
    for name in ("grad_ptr", "grad_scale_ptr", "other_scale_ptr"):  # as they come where there is no gradient
        del pointers[name]
    constants: dict[str, Any] = dict.fromkeys(("grad_ptr", "grad_scale_ptr", "other_scale_ptr"))
    constants |= {"KIND": module.SWIGLU, "PER_TENSOR": True, "SLOTS": module.SLOTS, "EVEN": True}
    constants |= {"BLOCK_M": block_m, "BLOCK_N": block_n, "MOST": 448.0, "LEAST": module.LEAST_AMAX}
    types = pointers | dict.fromkeys(("m", "n", "n_blocks"), "i32")
    ptx = compiled(kernel, types, constants, (*pointers, "m", "n"), num_warps=module.WARPS)["ptx"]
    of_a_thread = 2 * block_m * block_n // (32 * module.WARPS)  # numbers, half of them for rows
    assert len(re.findall(r"cvt\.\S*\.e4m3x2\.f32", ptx)) == of_a_thread // 2, "two numbers a cast"
