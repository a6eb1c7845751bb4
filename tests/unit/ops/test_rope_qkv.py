"""One product to turned heads and back, and the scale of a gradient: contracts, gradients in float64, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.linear_cross_entropy import scale_
from caramba.ops.rope import rope, rope_qkv

OPS = torch.ops.caramba
HEADS, KV_HEADS, PAIRS = 4, 2, 3
WIDTH = (HEADS + 2 * KV_HEADS) * 2 * PAIRS


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def permuted(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """A tensor of `shape` whose memory runs the other way."""
    return drawn(*reversed(shape), seed=seed, dtype=dtype).permute(*reversed(range(len(shape)))).detach()


def tables(*before: int, tokens: int = 5, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    angles = drawn(*before, 1, tokens, PAIRS, seed=9, dtype=dtype) * 3
    return angles.cos(), angles.sin()


def gradients(dtype: torch.dtype) -> tuple[Tensor, ...]:
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return tuple(permuted(2, n, 5, 2 * PAIRS, seed=at, dtype=dtype).requires_grad_() for at, n in enumerate(heads))


def in_steps(joined: Tensor, cos: Tensor, sin: Tensor, scale: float) -> tuple[Tensor, ...]:
    """Split, turn by the op that turns one tensor, scale."""
    heads = joined.unflatten(-1, (HEADS + 2 * KV_HEADS, -1)).transpose(1, 2)
    q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    return rope(q, cos, sin, scale), rope(k, cos, sin), v


def test_contracts_hold_under_opcheck() -> None:
    """What AOT makes of them is checked with the layers that call them, in tests/unit/layer/test_products.py."""
    joined = permuted(2, 5, WIDTH, dtype=torch.float32).requires_grad_()
    how = (*tables(dtype=torch.float32), HEADS, KV_HEADS, 0.5)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(OPS.rope_qkv.default, (joined, *how), test_utils=tests)
    torch.library.opcheck(OPS.rope_qkv_backward.default, (*gradients(torch.float32), *how), test_utils=tests)
    for test in (tests[0], tests[2]):
        torch.library.opcheck(OPS.scale_.default, (drawn(7), torch.tensor(3.0)), test_utils=test)


def test_gradients_of_both_orders_are_those_of_the_map() -> None:
    """A linear map has the gradient of every point: the second order is that of the gradient's own op."""
    how = (*tables(1, tokens=2), HEADS, KV_HEADS, 0.5)
    joined = permuted(1, 2, WIDTH).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: OPS.rope_qkv.default(x, *how), (joined,))
    back = tuple(x[:1, :, :2].detach().requires_grad_() for x in gradients(torch.float64))
    assert torch.autograd.gradcheck(lambda *x: OPS.rope_qkv_backward.default(*x, *how), back)


@pytest.mark.parametrize("before", [(), (2,)])
def test_one_pass_gives_what_steps_give(before: tuple[int, ...]) -> None:
    joined, (cos, sin) = drawn(2, 5, WIDTH).requires_grad_(), tables(*before)
    ours, want = rope_qkv(joined, cos, sin, HEADS, KV_HEADS, 0.25), in_steps(joined, cos, sin, 0.25)
    weights = [drawn(*x.shape, seed=at) for at, x in enumerate(want)]
    for got, expected in zip(ours, want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        assert got.transpose(1, 2).is_contiguous()
    grads = [
        torch.autograd.grad([(x * w).sum() for x, w in zip(xs, weights, strict=True)], joined)[0] for xs in (ours, want)
    ]
    assert grads[0].is_contiguous()
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_what_does_not_fit_is_refused() -> None:
    cos, sin = tables()
    with pytest.raises(ConfigError, match=r"floating \[B, T, 8 D\] and both floating \[1, T, D/2\]"):
        rope_qkv(drawn(2, 4, WIDTH), cos, sin, HEADS, KV_HEADS)
    with pytest.raises(ConfigError, match="cos and sin require gradients"):
        rope_qkv(drawn(2, 5, WIDTH), cos.requires_grad_(), sin, HEADS, KV_HEADS)
    with pytest.raises(ConfigError, match=r"scale_: x is torch.float64 on cpu and the factor torch.float64 \(2,\)"):
        scale_(drawn(3), drawn(2))


def test_a_tensor_is_scaled_where_it_lies() -> None:
    x = drawn(3, 4)
    assert scale_(x, torch.tensor(0.5)) is x
    torch.testing.assert_close(x, drawn(3, 4) / 2)
