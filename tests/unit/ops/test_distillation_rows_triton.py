"""The Triton kernel of `distillation_rows` against its reference, in the interpreter."""

from __future__ import annotations

import os

import pytest
import torch

from caramba.ops.distillation_rows import reference_distillation_rows

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the interpreter's process")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float16, 4e-3)])
@pytest.mark.parametrize("n_classes", [1, 17, 4096, 9001])
@pytest.mark.parametrize(("temperature", "weight"), [(1.0, 1.0), (2.0, 1.0), (2.0, 0.6), (1.0, 0.6)])
def test_kernel_equals_reference(
    dtype: torch.dtype, tolerance: float, n_classes: int, temperature: float, weight: float
) -> None:
    from caramba.kernels.triton.distillation_rows import distillation_rows as launcher

    random = torch.Generator().manual_seed(7)
    buffer = torch.full((5, n_classes + 3), float("nan"), dtype=dtype)
    buffer[:, :n_classes] = torch.randn(5, n_classes, generator=random).mul(4).to(dtype)
    teacher = torch.randn(5, n_classes, generator=random).mul(4).to(dtype)
    targets = torch.randint(0, n_classes, (5,), generator=random)
    targets[1] = -100
    wanted = [
        buffer[:, :n_classes].double(),
        torch.empty(5, dtype=torch.float64),
        torch.empty(5, dtype=torch.float64),
    ]
    reference_distillation_rows(
        wanted[0], teacher.double(), targets, wanted[1], wanted[2], -100, temperature, weight, True
    )
    kl, ce = (torch.full((5,), float("nan")) for _ in range(2))
    logits = buffer[:, :n_classes]
    launcher(logits, teacher, targets, kl, ce, -100, temperature, weight, True)
    for found, value in zip((logits, kl, ce), wanted, strict=True):
        torch.testing.assert_close(found.double(), value, rtol=tolerance, atol=tolerance)
    assert buffer[:, n_classes:].isnan().all(), "padding behind a row"
