"""The Triton kernels that a compiled training step calls on joined products, against float64: turned heads and their
gradient, the gradient of a packed SwiGLU, and the scale of a gradient.

On a GPU in all dtypes and at the sizes of a 1B model; without one in the interpreter, by
`tests/ops/test_units_in_the_interpreter.py`. Everything that is allocated and not written is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from caramba.ops.linear_cross_entropy import scale_
from caramba.ops.rope import reference_rope_qkv, reference_rope_qkv_backward, rope_qkv
from tests.unit.ops.kernel_device import DEVICE, HAS_GPU, RUNS_KERNELS, attached_kernels

pytestmark = RUNS_KERNELS
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if HAS_GPU else [])]
CASES = [(2, 5, 4, 2, 3), (1, 7, 3, 3, 8), (3, 1, 2, 1, 1), (0, 4, 2, 1, 4), (1, 70, 5, 1, 16)]
LARGE = [(8, 2048, 32, 8, 32), (2, 1000, 16, 16, 64)] if HAS_GPU else []


@pytest.fixture(autouse=True, scope="module")
def attached() -> Iterator[None]:
    yield from attached_kernels("rope_qkv", "scale")


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x.to(dtype).to(DEVICE)


def near(got: Tensor, want: Tensor) -> None:
    """One rounding to the dtype, and those of fp32 before it."""
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=eps, atol=4e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "tokens", "heads", "kv_heads", "pairs"), [*CASES, *LARGE])
def test_heads_and_their_gradient(
    batch: int, tokens: int, heads: int, kv_heads: int, pairs: int, dtype: torch.dtype
) -> None:
    width = (heads + 2 * kv_heads) * 2 * pairs
    for before, is_strided in (((), False), ((batch,), True)):
        if is_strided and batch == 0:
            continue
        angles = drawn(*before, 1, tokens, pairs, seed=3) * 3
        cos, sin = angles.cos(), angles.sin()
        joined = drawn(batch, tokens, width + 16 * is_strided, dtype=dtype)[..., :width].requires_grad_()
        parts = rope_qkv(joined, cos, sin, heads, kv_heads, 0.125)
        wide = (cos.double(), sin.double(), heads, kv_heads, 0.125)
        for got, want in zip(parts, reference_rope_qkv(joined.detach().double(), *wide), strict=True):
            near(got, want)
            assert got.transpose(1, 2).is_contiguous()
        # Gradients in any order of strides, as the backward of attention gives them.
        grads = [drawn(*x.shape, seed=at + 5, dtype=dtype) for at, x in enumerate(parts)]
        if is_strided:
            grads[0] = grads[0].transpose(1, 2).contiguous().transpose(1, 2)
            grads[2] = grads[2].transpose(-1, -2).contiguous().transpose(-1, -2)
        (got,) = torch.autograd.grad(parts, joined, grads)
        near(got, reference_rope_qkv_backward(*(g.double() for g in grads), *wide))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5,), (0,), (3, 5000), *([(6000, 6000)] if HAS_GPU else [])])
def test_scale(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = drawn(*shape, dtype=dtype)
    for by in (1.0, 0.3, float("nan")):
        ours = x.clone()
        scale_(ours, torch.tensor(by, device=DEVICE))
        want = x.double() * torch.tensor(by).double().to(DEVICE)
        torch.testing.assert_close(ours.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-7, equal_nan=True)
    every_second = drawn(8, dtype=dtype)[::2]
    assert torch.equal(scale_(every_second, torch.tensor(2.0, device=DEVICE)), drawn(8, dtype=dtype)[::2] * 2)
