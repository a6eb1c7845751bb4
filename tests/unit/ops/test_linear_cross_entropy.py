"""linear_cross_entropy against all logits in float64: exact, ragged, bounded in memory, on every implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from caramba import kernels
from caramba.errors import ConfigError
from caramba.ops import get_backend_info
from caramba.ops.linear_cross_entropy import cross_entropy_rows, linear_cross_entropy, rows_per_chunk
from tests.unit.ops.linear_cross_entropy_cases import dense, drawn

SIZES = [(13, 8, 29, 5), (4, 3, 1, 1), (1, 2, 7, 9), (0, 4, 5, 2), (6, 4, 65, 6)]


@pytest.mark.parametrize(("n", "m", "v", "chunk"), SIZES)
@pytest.mark.parametrize(("scale", "z_loss"), [(1.0, 0.0), (1.7, 0.1)])
def test_loss_and_gradients_are_those_of_all_logits(
    n: int, m: int, v: int, chunk: int, scale: float, z_loss: float
) -> None:
    hidden, weight, targets = drawn(n, m, v, torch.float64)
    total, *expected = dense(hidden, weight, targets, scale, z_loss)
    hidden.requires_grad_()
    weight.requires_grad_()
    kept = max(1, int((targets != -100).sum()))
    loss = linear_cross_entropy(hidden, weight, targets, chunk=chunk, scale=scale, z_loss=z_loss)
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss.detach(), total / kept, rtol=1e-13, atol=1e-13)
    kept_graph = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    (3 * loss).backward()  # twice: the first backward must have left the stored gradients as they were
    for once, leaf, want in zip(kept_graph, (hidden, weight), expected, strict=True):
        torch.testing.assert_close(once, want / kept, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(leaf.grad, 3 * want / kept, rtol=1e-12, atol=1e-13)


def test_gradcheck_and_opcheck() -> None:
    hidden, weight, targets = drawn(7, 4, 11, torch.float64)
    hidden.requires_grad_()
    weight.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, targets, chunk=3, scale=0.8, z_loss=0.1), (hidden, weight)
    )
    op = torch.ops.caramba.linear_cross_entropy.default
    permuted = torch.randn(4, 7, dtype=torch.float64).t().requires_grad_()
    for h, wants_weight in ((hidden, True), (permuted, True), (hidden, False)):
        torch.library.opcheck(
            op,
            (h, weight if wants_weight else weight.detach(), targets, -100, 1.0, 0.1, 3, True, wants_weight),
        )
    rows = torch.ops.caramba.cross_entropy_rows.default
    for logits in (torch.randn(7, 11), torch.randn(7, 64)[:, :11]):
        torch.library.opcheck(rows, (logits, targets, torch.empty(7), -100, 0.8, 0.1, True))


def test_a_scaled_loss_keeps_gradients_of_float16_features_in_its_range() -> None:
    hidden, weight, targets = drawn(2048, 8, 11, torch.float32)
    weight.mul_(0.01)
    _, want, _ = dense(hidden.double(), weight.double(), targets, 1.0, 0.0)
    half = hidden.half().requires_grad_()
    weight.requires_grad_()
    waste = [torch.full((256, 64), torch.nan, dtype=torch.half) for _ in range(16)]
    del waste  # so that memory which is not written is likely to be NaN: 11 classes are an odd width
    (linear_cross_entropy(half, weight, targets, chunk=256) * 2.0**17).backward()
    want = want * 2.0**17 / int((targets != -100).sum())
    assert half.grad is not None
    assert weight.grad is not None
    assert torch.isfinite(weight.grad).all()
    error = (half.grad.double() - want).norm() / want.norm()
    assert error < 2e-3, "a mean's rows of 1e-6 would be multiples of 6e-8"


def test_nothing_that_counts_is_zero_loss_and_zero_gradient() -> None:
    hidden, weight, _ = drawn(5, 4, 6, torch.float32)
    hidden.fill_(float("inf")).requires_grad_()  # what stands in padding does not matter
    weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, torch.full((5,), 3), ignore_index=3)
    loss.backward()
    assert loss == 0
    hidden_grad = hidden.grad
    assert hidden_grad is not None
    assert not hidden_grad.any()


def test_a_narrow_dtype_keeps_the_weight_gradient_in_the_weights_own() -> None:
    hidden, weight, targets = drawn(64, 16, 50, torch.float32)
    total, _, expected = dense(hidden.bfloat16(), weight.bfloat16(), targets, 1.0, 0.0)
    weight.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets, chunk=8)
        loss.backward()
    kept = int((targets != -100).sum())
    assert loss.dtype == torch.float32
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert float((weight.grad.double() * kept - expected).norm() / expected.norm()) < 4e-3
    assert abs(float(loss.detach()) * kept - float(total)) < 4e-3 * float(total)


def test_without_gradients_none_are_made() -> None:
    hidden, weight, targets = drawn(6, 4, 9, torch.float32)
    weight.requires_grad_()
    with torch.no_grad():
        alone = linear_cross_entropy(hidden, weight, targets)
    assert not alone.requires_grad
    loss = linear_cross_entropy(hidden, weight, targets)
    assert torch.equal(alone, loss.detach())
    loss.backward()
    assert weight.grad is not None
    assert hidden.grad is None


def test_chunks_are_whole_tiles_of_bounded_logits() -> None:
    hidden = torch.empty(8 * 2048, 1, dtype=torch.bfloat16, device="meta")
    assert rows_per_chunk(hidden, 128256) == 2048
    assert rows_per_chunk(hidden[:100], 128256) == 128
    assert rows_per_chunk(hidden, 10**9) == 128
    assert rows_per_chunk(hidden, 50257) == 4096
    # 8 x 2048 tokens of width 2048 under autocast: dhidden, hidden and the weight in bfloat16, and the logits beside
    held = (2 * 16384 * 2048 + 128256 * 2048) * 2
    rows = rows_per_chunk(hidden, 128256, held)
    assert rows == 1280
    assert held + rows * 128256 * 2 <= 10**9
    assert rows_per_chunk(hidden, 128256, 2 * held) == 1024  # the rest alone is over it


def test_a_target_outside_the_vocabulary_is_nan_where_the_host_does_not_wait() -> None:
    logits, losses = torch.randn(4, 9), torch.empty(4)
    expected = logits.softmax(-1)
    expected[0, 8] -= 1
    cross_entropy_rows(logits, torch.tensor([8, 9, -100, -1]), losses)
    assert losses.isnan().tolist() == [False, True, False, True]
    assert logits[[1, 3]].isnan().all()
    torch.testing.assert_close(logits[0], expected[0])
    assert not logits[2].any()


def test_bad_input_is_refused_by_name() -> None:
    hidden, weight, targets = drawn(6, 4, 9, torch.float32)
    with pytest.raises(ConfigError, match=r"hidden \(6, 4\), weight \(4, 9\) and targets \(6,\), expected \[N, M\]"):
        linear_cross_entropy(hidden, weight.t(), targets)
    with pytest.raises(ConfigError, match=r"targets torch.int32, expected floating point twice and int64"):
        linear_cross_entropy(hidden, weight, targets.int())
    with pytest.raises(ConfigError, match=r"logits have strides \(1, 6\) and losses \(1,\), expected 1 within a row"):
        cross_entropy_rows(torch.empty(9, 6).t(), targets, torch.empty(6))
    with pytest.raises(ConfigError, match=r"losses torch.float64, expected floating point, int64 and torch.float32"):
        cross_entropy_rows(torch.empty(6, 9), targets, torch.empty(6, dtype=torch.float64))
    targets[3] = 9
    with pytest.raises(ConfigError, match=r"target 9 of row 3 is outside the vocabulary of 9; expected 0 to 8"):
        linear_cross_entropy(hidden, weight, targets)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
def test_on_the_gpu(dtype: torch.dtype, tolerance: float, weight_dtype: torch.dtype | None) -> None:
    kernels.load("cuda")
    assert get_backend_info("cuda")["ops"]["cross_entropy_rows"] == "triton"
    torch.backends.cuda.matmul.allow_tf32 = False
    for n, m, v, chunk in ((777, 64, 5003, 256), (300, 128, 128256, None), (5, 16, 33, 2), (0, 8, 16, 1)):
        hidden, weight, targets = drawn(n, m, v, dtype, "cuda")
        total, *expected = dense(hidden, weight, targets, 0.9, 0.01)
        weight = weight if weight_dtype is None else weight.to(weight_dtype)
        hidden.requires_grad_()
        weight.requires_grad_()
        loss = linear_cross_entropy(hidden, weight, targets, chunk=chunk, scale=0.9, z_loss=0.01)
        loss.backward()
        kept = max(1, int((targets != -100).sum()))
        assert abs(float(loss.detach()) * kept - float(total)) <= tolerance * max(1.0, abs(float(total))), (
            n,
            v,
        )
        for leaf, want in zip((hidden, weight), expected, strict=True):
            assert leaf.grad is not None
            assert leaf.grad.dtype == leaf.dtype
            error = float((leaf.grad.double() * kept - want).norm() / want.norm().clamp_min(1e-6))
            assert error < tolerance, (n, m, v, dtype, weight_dtype, error)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_on_the_gpu_is_one_chunk_beside_the_gradients() -> None:
    kernels.load("cuda")
    n, m, v = 4096, 1024, 128256
    hidden = torch.randn(n, m, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(v, m, device="cuda", dtype=torch.bfloat16).mul_(0.03).requires_grad_()
    targets = torch.randint(v, (n,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, targets).backward()
    gradients = (hidden.numel() + weight.numel()) * 2
    extra = torch.cuda.max_memory_allocated() - before - gradients
    assert extra < 0.6e9, f"{extra / 1e9:.3f} GB beside the gradients"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_memory_at_8_x_2048_x_128256_is_one_gigabyte_with_dhidden(weight_dtype: torch.dtype) -> None:
    kernels.load("cuda")
    n, m, v = 8 * 2048, 2048, 128256
    hidden = torch.randn(n, m, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(v, m, device="cuda", dtype=weight_dtype).normal_(std=0.02).requires_grad_()
    targets = torch.randint(v, (n,), device="cuda")
    linear_cross_entropy(hidden[:256], weight, targets[:256]).backward()  # gives cuBLAS its workspace
    hidden.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, targets).backward()
    extra = torch.cuda.max_memory_allocated() - before - weight.numel() * weight.element_size()
    assert extra <= 1e9, f"{extra / 1e9:.3f} GB beside dW"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_target_outside_the_vocabulary_on_the_gpu() -> None:
    kernels.load("cuda")
    hidden, weight, targets = drawn(6, 16, 33, torch.bfloat16, "cuda")
    hidden.requires_grad_()
    targets[3] = 33
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    assert loss.isnan()
    assert hidden.grad is not None
    assert hidden.grad.isnan().any(-1).tolist() == [row == 3 for row in range(6)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("way", ["kept", "traced"])
def test_gradients_have_one_scale_whichever_way_they_are_scaled(dtype: torch.dtype, way: str) -> None:
    """The scale of a mean, 17 / 13 here, is not rounded to 16 bits where the graph is kept or traced."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 8, generator=generator).to(dtype).requires_grad_() for rows in (17, 33))
    targets = torch.randint(33, (17,), generator=generator)
    targets[:4] = -100

    def gradients(loss: Callable[..., Tensor], **options: Any) -> list[Tensor]:
        found = torch.autograd.grad(loss(hidden, weight, targets), (hidden, weight), **options)
        return [grad.clone() for grad in found]

    expected = gradients(linear_cross_entropy)
    if way == "kept":
        found = gradients(linear_cross_entropy, retain_graph=True)
    else:
        found = gradients(torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True))
    for ours, want in zip(found, expected, strict=True):
        assert torch.equal(ours, want)
