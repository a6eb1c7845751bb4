"""The Triton kernel of `dba_append` against a plain loop, on a GPU or, by `test_in_the_interpreter.py`, interpreted."""

from __future__ import annotations

import pytest
import torch

from caramba.ops.dba_append import reference_dba_append
from tests.ops.test_dba_append import CASES, DEVICE, INTERPRETED, arguments, check, looped


@pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="runs in the interpreter's process")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_equals_a_loop_and_writes_nowhere_else(dtype: torch.dtype) -> None:
    from caramba.kernels.triton.dba_append import dba_append as launched

    check(launched, dtype, dtype, 1e-6 if dtype == torch.float32 else 2e-3)
    check(launched, dtype, torch.float32, 1e-6 if dtype == torch.float32 else 2e-3)
    with pytest.raises(ValueError, match="expected at most 3, of 16 or 32 bits"):
        launched(*arguments("standard", [0], 1, torch.float64, torch.float32))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_the_kernel_rounds_bfloat16_as_the_reference() -> None:
    from caramba.kernels.triton.dba_append import dba_append as launched

    for name in CASES:
        args, same = (arguments(name, [3, 6], 1, torch.bfloat16, torch.float16) for _ in range(2))
        launched(*args)
        reference_dba_append(*same)
        for got, want in zip(args[1], same[1], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


@pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="runs in the interpreter's process")
def test_lengths_may_lie_apart() -> None:
    from caramba.kernels.triton.dba_append import dba_append as launched

    streams, buffers, lengths, *rest = arguments("standard", [5, 1, 3], 1, torch.float32, torch.float32)
    wanted = looped(streams, buffers, lengths, *rest)
    for apart in (lengths[:, None].repeat(1, 2)[:, 0], lengths):  # the one's plan is not the other's
        launched(streams, buffers, apart, *rest)
        for got, want in zip(buffers, wanted, strict=True):
            torch.testing.assert_close(got, want)
