"""The Triton kernel of cross_entropy_rows against float64, in the interpreter; `test_linear_cross_entropy.py` has the
tests on a GPU."""

from __future__ import annotations

import os

import pytest
import torch

from caramba.ops.backend import attach, implementation
from caramba.ops.linear_cross_entropy import reference_linear_cross_entropy
from tests.unit.ops.linear_cross_entropy_cases import dense, drawn

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the interpreter's process")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 2e-3)])
@pytest.mark.parametrize(
    ("n", "m", "v", "chunk"), [(5, 8, 17, 2), (3, 16, 64, 8), (4, 8, 9001, 4), (1, 4, 1, 1), (0, 4, 5, 2)]
)
@pytest.mark.parametrize(("scale", "z_loss"), [(1.0, 0.0), (0.7, 0.05)])
def test_loss_and_gradients_are_those_of_all_logits(
    n: int, m: int, v: int, chunk: int, scale: float, z_loss: float, dtype: torch.dtype, tolerance: float
) -> None:
    from caramba.kernels.triton.cross_entropy_rows import cross_entropy_rows as launcher

    attach("cross_entropy_rows", "cpu", "triton", launcher)
    assert implementation("cross_entropy_rows", "cpu") == "triton"
    hidden, weight, targets = drawn(n, m, v, dtype)
    found = reference_linear_cross_entropy(hidden, weight, targets, -100, scale, z_loss, chunk, True, True)
    expected = dense(hidden, weight, targets, scale, z_loss)
    for name, ours, theirs in zip(("loss", "dhidden", "dweight"), found, expected, strict=True):
        # In float16 the gradient of a row of the mean is made from the sum's by the backward.
        ours = ours.double() * (1 if name == "dhidden" and dtype == torch.float16 else n)
        error = float((ours - theirs).norm() / theirs.norm().clamp_min(0.5)) if theirs.numel() else 0.0
        assert error < tolerance, (name, error)
    (loss_only, *empty) = reference_linear_cross_entropy(
        hidden, weight, targets, -100, scale, z_loss, chunk, False, False
    )
    assert torch.equal(loss_only, found[0])
    assert [tensor.numel() for tensor in empty] == [0, 0]


def test_padded_rows_keep_to_themselves() -> None:
    """What stands behind a row's classes is neither read into the loss nor written; a row's NaN stays in its row."""
    from caramba.kernels.triton.cross_entropy_rows import cross_entropy_rows as launcher

    buffer = torch.full((3, 64), float("nan"))
    buffer[:, :10] = torch.randn(3, 10, generator=torch.Generator().manual_seed(1))
    buffer[2, 4] = float("nan")
    wanted = buffer[:2, :10].double().log_softmax(-1)
    losses = torch.full((3,), float("nan"))
    targets = torch.tensor([9, 11, 0])
    launcher(buffer[:, :10], targets, losses, -100, 1.0, 0.0, True)
    torch.testing.assert_close(losses[0].double(), -wanted[0, 9], rtol=1e-6, atol=1e-6)
    assert losses[1:].isnan().all(), "a target outside the vocabulary, and a row with NaN"
    assert buffer[:, 10:].isnan().all()
    assert buffer[1, :10].isnan().all(), "the gradient of a target outside the vocabulary"
    grad = wanted[0].exp()
    grad[9] -= 1
    torch.testing.assert_close(buffer[0, :10].double(), grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n_classes", [40000, 32768])
def test_rows_of_many_steps_and_rows_that_do_not_count(n_classes: int) -> None:
    """Whole steps, a last one or none, targets in either, and NaN that nobody may see."""
    from caramba.kernels.triton.cross_entropy_rows import cross_entropy_rows as launcher

    width = n_classes + 64
    buffer = torch.randn(4, width, generator=torch.Generator().manual_seed(2)) * 3
    buffer[3], buffer[:, n_classes:] = float("nan"), float("nan")
    logits, before = buffer[:, :n_classes], buffer.clone()
    wide = (logits[:3].double() * 0.7).requires_grad_()
    targets = torch.tensor([1, n_classes - 1, 20000, -100])
    lse = wide.logsumexp(-1)
    expected = lse - wide[range(3), targets[:3]] + 0.1 * lse.square()
    (slope,) = torch.autograd.grad(expected.sum(), wide)
    losses = torch.full((4,), float("nan"))
    launcher(logits, targets, losses, -100, 0.7, 0.1, False)
    torch.testing.assert_close(buffer, before, equal_nan=True, rtol=0, atol=0)
    launcher(logits, targets, losses, -100, 0.7, 0.1, True)
    torch.testing.assert_close(losses[:3].double(), expected.detach(), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(logits[:3].double(), slope * 0.7, rtol=1e-5, atol=1e-8)
    assert losses[3] == 0
    assert not logits[3].any()
    assert buffer[:, n_classes:].isnan().all()
