"""`small_batch_linear` against its parts in float64: its contract and its reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.small_batch_linear import MAX_ROWS, dequantize_int4, pack_int4, small_batch_linear


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def arguments(rows: int, width: int, n_out: int, gated: bool, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """x of another shape than rows alone, and everything that the op can add to a product."""
    n_rows = n_out * (2 if gated else 1)
    return {
        "x": drawn(rows, 1, width, seed=0, dtype=dtype),
        "weight": drawn(n_rows, width, seed=1, dtype=dtype) * width**-0.5,
        "scale": None,
        "bias": drawn(n_rows, seed=2, dtype=dtype),
        "residual": drawn(rows, 1, n_out, seed=3, dtype=dtype),
        "norm": drawn(width, seed=4, dtype=dtype),
        "eps": 0.01,
        "gated": gated,
    }


def coded(given: dict[str, Any]) -> dict[str, Any]:
    """The same with a weight of codes, the largest of a row 127 or near it, and a scale of each row."""
    weight = given["weight"]
    scale = weight.double().abs().amax(1) / 127 + 1e-9
    codes = (weight.double() / scale[:, None]).round().to(torch.int8)
    return given | {"weight": codes, "scale": scale.float()}


def in_words(given: dict[str, Any], group: int) -> dict[str, Any]:
    """The same with a weight of words of codes of 4 bits, and a scale and a zero of each group."""
    grouped = given["weight"].double().unflatten(1, (-1, group))
    low, high = grouped.amin(2), grouped.amax(2)
    scale = torch.stack([(high - low) / 15 + 1e-9, low], dim=2).bfloat16()
    step, zero = scale.double()[..., None].unbind(2)
    codes = ((grouped - zero) / step).round().clamp(0, 15).to(torch.int32).flatten(1)
    return given | {"weight": pack_int4(codes, group), "scale": scale}


def by_parts(given: dict[str, Any]) -> Tensor:
    """The same from the modules that it stands for."""
    x = given["x"]
    if given["eps"] is not None:
        x = F.rms_norm(x, x.shape[-1:], given["norm"], given["eps"])
    weight, scale = given["weight"], given["scale"]
    if weight.dtype == torch.int16:
        weight = dequantize_int4(weight, scale, x.dtype)
    else:
        weight = weight.to(x.dtype) * (1 if scale is None else scale[:, None])
    y = F.linear(x, weight, given["bias"])
    if given["gated"]:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if given["residual"] is None else given["residual"] + y


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("without", [(), ("bias", "norm"), ("residual", "norm", "eps")])
@pytest.mark.parametrize("has_codes", [False, True])
def test_it_is_its_parts(gated: bool, without: tuple[str, ...], has_codes: bool) -> None:
    given: dict[str, Any] = arguments(3, 6, 5, gated) | dict.fromkeys(without)
    given = coded(given) if has_codes else given
    torch.testing.assert_close(small_batch_linear(**given), by_parts(given), rtol=1e-12, atol=1e-12)
    if without == ("bias", "norm"):
        torch.library.opcheck(torch.ops.caramba.small_batch_linear.default, tuple(given.values()))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("without", [(), ("bias", "norm"), ("residual", "norm", "eps")])
def test_of_words_it_is_its_parts(gated: bool, without: tuple[str, ...]) -> None:
    given: dict[str, Any] = in_words(arguments(3, 96, 5, gated) | dict.fromkeys(without), 32)
    torch.testing.assert_close(small_batch_linear(**given), by_parts(given), rtol=1e-12, atol=1e-12)
    if without == ("bias", "norm"):
        torch.library.opcheck(torch.ops.caramba.small_batch_linear.default, tuple(given.values()))


@pytest.mark.parametrize("group", [32, 64, 128])
def test_words_hold_every_code_where_they_say(group: int) -> None:
    codes = torch.arange(3 * 2 * group).view(3, -1) * 7 % 16
    words = pack_int4(codes, group)
    assert (words.dtype, words.shape) == (torch.int16, (3, group // 2))
    for feature in range(2 * group):
        within = feature % group
        word = words[:, feature // group * group // 4 + within % (group // 4)].int()
        assert torch.equal(word >> within // (group // 4) * 4 & 15, codes[:, feature].int())
    scale = torch.tensor([0.5, -3.0]).bfloat16().expand(3, 2, 2).contiguous()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(dequantize_int4(words, scale, dtype), (codes * 0.5 - 3).to(dtype))


def test_every_step_rounds_as_the_op_that_it_stands_for() -> None:
    given = arguments(2, 32, 16, gated=False, dtype=torch.bfloat16)
    normed = F.rms_norm(given["x"].float(), (32,), given["norm"].float(), 0.01).bfloat16()
    product = F.linear(normed.float(), given["weight"].float(), given["bias"].float()).bfloat16()
    torch.testing.assert_close(small_batch_linear(**given), given["residual"] + product, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"x": drawn(MAX_ROWS + 1, 1, 6, seed=0)}, "x: got torch.float64 .65, 1, 6."),
        ({"weight": drawn(5, 7, seed=0)}, "weight: got .* expected .N, 6."),
        ({"weight": drawn(5, 6, seed=0), "gated": True}, "expected .2F, 6."),
        ({"bias": drawn(4, seed=0)}, "bias: got .*expected torch.float64 of shape .5,."),
        ({"residual": drawn(3, 5, seed=0)}, "residual: got .* expected .* of shape .3, 1, 5."),
        ({"weight": drawn(5, 6, seed=0, dtype=torch.float32)}, "weight: got torch.float32"),
        ({"eps": None}, "norm: got .* with eps=None, expected .6,. .* and an eps"),
        ({"scale": torch.ones(5)}, "weight: got torch.float64 .*expected torch.int8 .* with a scale"),
        ({"weight": torch.ones(5, 6, dtype=torch.int8)}, "weight: got torch.int8 .* expected torch.float64"),
        (
            {"weight": torch.ones(5, 6, dtype=torch.int8), "scale": torch.ones(5, dtype=torch.float64)},
            "scale: got torch.float64 .* expected torch.float32 of shape .5,.",
        ),
        ({"scale": torch.ones(5, 1, 2)}, "weight: got torch.float64 .* expected .N, 1."),
        (
            {"weight": torch.ones(5, 1, dtype=torch.int16), "scale": torch.ones(5, 4, 2)},
            "scale: got .* of groups that share 6 inputs evenly",
        ),
        ({"x": drawn(3, 1, 6, seed=0).requires_grad_()}, "gradients: .*under torch.inference_mode"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"small_batch_linear: .*{said}"):
        small_batch_linear(**(arguments(3, 6, 5, gated=False) | wrong))
