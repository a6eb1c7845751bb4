"""Codes of 4 bits of weights: how near they are, and that nothing of a group is lost."""

from __future__ import annotations

import pytest
import torch

from caramba.lower import quantize as module
from caramba.lower.quantize import group_of, quantize_int4
from caramba.ops.small_batch_linear import dequantize_int4


def test_groups_are_the_largest_that_divide_a_width() -> None:
    assert [group_of(width) for width in (2048, 192, 96, 48)] == [128, 64, 32, None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_every_number_is_within_half_a_step(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(21, 384, generator=torch.Generator().manual_seed(0)).to(dtype)
    words, scale = quantize_int4(weight, 128)
    assert (words.dtype, words.shape) == (torch.int16, (21, 96))
    assert (scale.dtype, scale.shape) == (torch.bfloat16, (21, 3, 2))
    found = dequantize_int4(words, scale, torch.float64).unflatten(1, (3, 128))
    exact, step = weight.double().unflatten(1, (3, 128)), scale[..., :1].double()
    # Half a step, and at the ends what a scale of eight digits, and a zero of as many, leave out.
    slack = 0.5 * step + 15 * step * 2**-8 + exact.abs().amax(2, keepdim=True) * 2**-8
    assert ((found - exact).abs() <= slack).all()
    assert float((found - exact).norm() / exact.norm()) < 0.105
    if dtype == torch.bfloat16:
        assert torch.equal(scale[..., 1], weight.unflatten(1, (3, 128)).amin(2)), "a weight itself"
    monkeypatch.setattr(module, "AT_A_TIME", 5 * 384)
    by_parts = quantize_int4(weight, 128)
    assert all(torch.equal(*pair) for pair in zip(by_parts, (words, scale), strict=True))


@pytest.mark.parametrize("value", [0.0, -3.0, 1e-30])
def test_a_group_of_one_number_is_that_number(value: float) -> None:
    words, scale = quantize_int4(torch.full((2, 64), value), 32)
    found = dequantize_int4(words, scale, torch.float64)
    torch.testing.assert_close(found, torch.full((2, 64), value, dtype=torch.float64), rtol=2**-8, atol=1e-29)


def test_they_are_as_near_as_torchao_s() -> None:
    primitives = pytest.importorskip("torchao.quantization.quant_primitives")
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    size, form = (1, 128), torch.int32
    step, zero = primitives._choose_qparams_affine_tinygemm(
        weight, primitives.MappingType.ASYMMETRIC, size, form, 0, 15,
        scale_dtype=torch.bfloat16, zero_point_dtype=torch.bfloat16,
    )  # fmt: skip
    codes = primitives._quantize_affine_tinygemm(weight, size, step, zero, form, 0, 15)
    theirs = (codes.double().unflatten(1, (4, 128)) - 8) * step.double()[..., None] + zero.double()[..., None]
    ours = dequantize_int4(*quantize_int4(weight, 128), torch.float64)
    errors = [float((one.flatten(1) - weight.double()).norm()) for one in (ours, theirs)]
    assert errors[0] <= errors[1]
