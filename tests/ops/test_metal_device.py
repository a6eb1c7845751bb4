"""The same calls as in test_metal.py, by Apple's compiler on Apple's GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.metal_cases import DTYPES, OPS, Call, calls, errors_of, launcher

pytestmark = [
    pytest.mark.mps,
    pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs Apple's Metal device (MPS)"),
]
SAMPLES = 50


def moved(x: Any, device: str) -> Any:
    """Return arguments or results on a device, in their order of strides."""
    if isinstance(x, torch.Tensor):
        return x.to(device)
    return type(x)(moved(one, device) for one in x) if isinstance(x, (list, tuple)) else x


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_random_shapes_equal_float64(op: str, name: str) -> None:
    run = launcher(op)
    for i, call in enumerate(calls(op, name, SAMPLES)):
        on_device = Call(op, call.dtype, moved(call.args, "mps"))
        found = moved(on_device.run(run), "cpu")
        errors = errors_of(call, found)
        assert errors.are_small, f"{op} {name}, sample {i}: {errors}"
