"""Norms, RoPE, SwiGLU, dropout and Lion: contracts, gradients in float64, and torch's own functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.layer_norm import add_layer_norm, layer_norm
from caramba.ops.lion import lion_step
from caramba.ops.norm_dropout_activation import norm_dropout_activation
from caramba.ops.philox import LEVELS, dropout_mask, philox, rare_bound, resolve_probability
from caramba.ops.rms_norm import add_rms_norm, rms_norm
from caramba.ops.rope import rope
from caramba.ops.swiglu import swiglu

OPS = torch.ops.caramba


def drawn(*shape: int, seed: int = 0, grad: bool = False, dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype).requires_grad_(grad)


def permuted(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """A tensor of `shape` whose memory runs the other way."""
    x = drawn(*reversed(shape), seed=seed, dtype=dtype).permute(*reversed(range(len(shape))))
    return x.detach().requires_grad_()


def tables(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    angles = drawn(*shape, seed=9, dtype=dtype) * 3
    return angles.cos(), angles.sin()


def cases(make: Callable[..., Tensor], dtype: torch.dtype) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Every op with arguments, x made by `make`."""
    x, residual = make(3, 2, 7, dtype=dtype), make(3, 2, 7, seed=1, dtype=dtype)
    weight, bias = drawn(7, seed=2, grad=True, dtype=dtype), drawn(7, seed=3, grad=True, dtype=dtype)
    heads, packed = make(2, 4, 3, 6, dtype=dtype), make(3, 2, 8, dtype=dtype)
    return {
        "rms_norm": (OPS.rms_norm.default, (x, weight, 1e-5)),
        "rms_norm_plain": (OPS.rms_norm.default, (x, None, 1e-5)),
        "add_rms_norm": (OPS.add_rms_norm.default, (x, residual, weight, 1e-5)),
        "layer_norm": (OPS.layer_norm.default, (x, weight, bias, 1e-5)),
        "layer_norm_no_bias": (OPS.layer_norm.default, (x, weight, None, 1e-5)),
        "add_layer_norm": (OPS.add_layer_norm.default, (x, residual, weight, bias, 1e-5)),
        "rope": (OPS.rope.default, (heads, *tables(2, 3, 3, dtype=dtype), 0.5, False, dtype)),
        "rope_rows": (OPS.rope.default, (heads, *tables(2, 1, 3, 3, dtype=dtype), 1.0, True, dtype)),
        "swiglu": (OPS.swiglu.default, (x, residual)),
        "swiglu_packed": (OPS.swiglu_packed.default, (packed,)),
        **{
            f"norm_dropout_{f}": (
                OPS.norm_dropout_activation.default,
                (x, weight, bias, 1e-5, 0.3, 2**40 + 5, f),
            )
            for f in ("relu", "gelu", "silu")
        },
    }


NAMES = tuple(cases(permuted, torch.float64))


FAST = ("test_schema", "test_autograd_registration", "test_faketensor")
RETRACED = ("rms_norm_plain", "layer_norm_no_bias", "rope", "norm_dropout_relu", "norm_dropout_silu")
"""Second cases of an op: what AOT makes of it is checked on its first alone, as that takes ten times the rest."""


@pytest.mark.parametrize("name", NAMES)
def test_contracts_hold_under_opcheck(name: str) -> None:
    op, arguments = cases(permuted, torch.float32)[name]
    torch.library.opcheck(op, arguments, test_utils=FAST if name in RETRACED else "ALL")


def test_backwards_and_steps_hold_under_opcheck() -> None:
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    x, other = (permuted(3, 2, 7, seed=seed).detach().float() for seed in (0, 1))
    weight, rows = drawn(7).float(), drawn(3, 2).float()
    for op, arguments in (
        (OPS.rms_norm_backward, (other, None, x, rows, None)),
        (OPS.rms_norm_backward, (other, other, x, rows, weight)),
        (OPS.layer_norm_backward, (other, other, x, rows, rows, weight, None)),
        (OPS.swiglu_backward, (other, x, x)),
        (OPS.swiglu_packed_backward, (other[..., :3], x[..., :6])),
        (OPS.norm_dropout_activation_backward, (other, x, rows, rows, weight, weight, 0.5, 3, "gelu")),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=tests)
    lists = [[drawn(5, seed=seed), drawn(2, 3, seed=seed)] for seed in range(3)]
    torch.library.opcheck(OPS.lion_step.default, (*lists, 0.1, 0.9, 0.99, 0.1), test_utils=tests)
    wide, seed, t = [x.float() for x in lists[0]], torch.tensor(5), [torch.zeros(()) for _ in range(2)]
    narrow, moments = [x.bfloat16() for x in wide], [[x.clone() for x in wide] for _ in range(2)]
    rest = (0.1, 0.9, 0.99, 1e-8, 0.1, False, None, None, None, torch.tensor(0.0), seed, 0)
    for op, arguments in (
        (OPS.stochastic_round, (wide, narrow, seed, 0)),
        (OPS.adamw_step, (wide, *moments, t, [x.clone() for x in narrow], narrow, *rest[:-2], None, 0)),
        (OPS.adamw_step, ([x.clone() for x in narrow], *moments, t, wide, [], *rest)),
        (OPS.adamw_step, ([x.clone() for x in narrow], *moments, t, wide, [], *rest[:-2], None, 0, True)),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=tests)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_function(name: str) -> None:
    op, arguments = cases(permuted, torch.float64)[name]
    inputs = [at for at, value in enumerate(arguments) if isinstance(value, Tensor) and value.requires_grad]

    def differentiable(*values: Tensor) -> Any:
        full = list(arguments)
        for at, value in zip(inputs, values, strict=True):
            full[at] = value
        out = op(*full)
        results = (out,) if isinstance(out, Tensor) else out
        return tuple(y for y in results if y.shape == results[0].shape)  # without means and reciprocals

    assert torch.autograd.gradcheck(differentiable, tuple(arguments[at] for at in inputs))


@pytest.mark.parametrize("shape", [(5, 7), (1, 1), (2, 3, 33), (0, 8), (64,), (3, 0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ops_equal_torchs_in_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual = drawn(*shape).to(dtype), drawn(*shape, seed=1).to(dtype)
    weight, bias = drawn(shape[-1], seed=2).float(), drawn(shape[-1], seed=3).float()
    wide, total = x.double(), (x.float() + residual.float()).to(dtype)
    bound = {"rtol": torch.finfo(dtype).eps, "atol": 4e-6}

    def near(got: Tensor, want: Tensor) -> None:
        assert got.dtype == dtype
        assert got.is_contiguous()
        torch.testing.assert_close(got.double(), want, **bound)

    w, b = weight.double(), bias.double()
    near(rms_norm(x, weight, 1e-3), F.rms_norm(wide, shape[-1:], w, 1e-3))
    near(layer_norm(x, weight, bias, 1e-3), F.layer_norm(wide, shape[-1:], w, b, 1e-3))
    near(swiglu(x, residual), F.silu(wide) * residual.double())
    for fused, plain in ((add_rms_norm, rms_norm), (add_layer_norm, layer_norm)):
        y, kept_sum = fused(x, residual, weight)
        assert torch.equal(kept_sum, total)
        assert torch.equal(y, plain(total, weight, eps=1e-6 if fused is add_rms_norm else 1e-5))
    near(norm_dropout_activation(x, activation="silu"), F.silu(F.layer_norm(wide, shape[-1:])))
    if shape[-1] % 2 == 0:
        gate, up = x.double().chunk(2, -1)
        near(swiglu(x), F.silu(gate) * up)


def test_a_wide_weight_gets_its_gradient_in_its_own_dtype() -> None:
    x, weight = drawn(4, 6).half().requires_grad_(), drawn(6, seed=1).float().requires_grad_()
    _, total = add_rms_norm(x, x.detach(), weight)
    grads = torch.autograd.grad(total.sum(), (x, weight))  # only the sum was used
    assert torch.equal(grads[0], torch.ones_like(x))
    assert torch.equal(grads[1], torch.zeros_like(weight))
    grads = torch.autograd.grad(rms_norm(x, weight).sum(), (x, weight))
    assert [grad.dtype for grad in grads] == [torch.float16, torch.float32]


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_rope_turns_complex_numbers_by_group_and_undoes_itself(groups: int) -> None:
    x = drawn(2, 3, 4, 10).transpose(1, 2)
    cos, sin = tables(groups, 3, 5)
    first, second = x.chunk(2, -1)
    turned = torch.complex(first, second) * torch.complex(cos, sin).repeat_interleave(4 // groups, 0)
    y = rope(x, cos, sin, 2.0)
    torch.testing.assert_close(y, 2 * torch.cat((turned.real, turned.imag), -1))
    assert y.stride() == x.stride()
    torch.testing.assert_close(rope(y, cos, -sin, 0.5), x)
    assert rope(x.bfloat16(), cos, sin, dtype=torch.float32).dtype == torch.float32
    assert rope(x[:, :, :0], cos[:, :0], sin[:, :0]).shape == (2, 4, 0, 10)


def test_philox_gives_the_published_words() -> None:
    """The known answers of Random123 for philox4x32-10 and philox4x32-7."""
    zeros = tuple(torch.zeros(1, dtype=torch.int64) for _ in range(4))
    ones = tuple(torch.full((1,), 0xFFFFFFFF) for _ in range(4))
    pi = tuple(torch.tensor([word]) for word in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344))
    for counter, seed, words in (
        (zeros, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (ones, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (pi, 0x299F31D0A4093822, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        assert tuple(int(word) for word in philox(seed, counter, 10)) == words
    for counter, seed, words in (
        (zeros, 0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (ones, 2**64 - 1, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (pi, 0x299F31D0A4093822, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    ):
        assert tuple(int(word) for word in philox(seed, counter)) == words


def test_as_many_halves_are_dropped_as_a_probability_says() -> None:
    every = torch.arange(LEVELS)
    numbers = torch.where(every < LEVELS // 2, every, every - LEVELS).to(torch.int16).view(torch.float16)
    for count in (
        0,
        1,
        655,
        6554,
        31743,
        31744,
        31745,
        31746,
        32768,
        32769,
        33790,
        33791,
        45875,
        65535,
        65536,
    ):
        p = resolve_probability(count / LEVELS)
        assert abs(p * LEVELS - count) == (count in (31745, 33791)), "the two zeros of float16 are one number"
        bits, drops = rare_bound(count / LEVELS)
        below = int((numbers < numbers[bits]).sum())
        assert (below if drops else LEVELS - below) == p * LEVELS


def test_dropout_is_a_function_of_seed_and_place_and_off_in_eval() -> None:
    x = drawn(200, 50).float()
    plain = norm_dropout_activation(x, activation="gelu")
    assert torch.equal(plain, norm_dropout_activation(x, activation="gelu", p=0.4, training=False))
    y = norm_dropout_activation(x, activation="relu", p=0.25, seed=7)
    mask = dropout_mask(7, 0.25, 200, 50, x.device)
    torch.testing.assert_close(y, F.relu(F.layer_norm(x, (50,)) * mask / 0.75))
    assert mask.double().mean() == pytest.approx(0.75, abs=0.02)  # 4.6 standard deviations
    assert torch.equal(mask[:9, :13], dropout_mask(7, 0.25, 9, 13, x.device))  # whatever the sizes
    assert (mask != dropout_mask(8, 0.25, 200, 50, x.device)).double().mean() == pytest.approx(0.375, abs=0.03)
    assert not norm_dropout_activation(x, activation="gelu", p=1.0, seed=1).any()
    assert torch.equal(plain, norm_dropout_activation(x, activation="gelu", p=2**-17, seed=1)), "rounds to 0"
    third = [norm_dropout_activation(x, activation="relu", p=p, seed=7) for p in (1 / 3, 21845 / 65536)]
    assert torch.equal(*third), "the mask and the scale are those of the nearest 1/65536"
    torch.manual_seed(3)
    first = norm_dropout_activation(x, activation="silu", p=0.5)
    assert not torch.equal(first, norm_dropout_activation(x, activation="silu", p=0.5))
    torch.manual_seed(3)
    assert torch.equal(first, norm_dropout_activation(x, activation="silu", p=0.5))


def test_lion_follows_its_formula_and_keeps_dtypes() -> None:
    w, m, g = drawn(6), drawn(6, seed=1), drawn(6, seed=2)
    expected_w = w * (1 - 0.1 * 0.3) - 0.1 * torch.sign(0.8 * m + 0.2 * g)
    expected_m = 0.95 * m + 0.05 * g
    halves = (w.bfloat16(), m.float(), g.bfloat16())
    lists = [[value.clone(), half.clone()] for value, half in zip((w, m, g), halves, strict=True)]
    lion_step(*lists, lr=0.1, beta1=0.8, beta2=0.95, weight_decay=0.3)
    torch.testing.assert_close(lists[0][0], expected_w)
    torch.testing.assert_close(lists[1][0], expected_m)
    assert torch.equal(lists[2][0], g)
    assert [one[1].dtype for one in lists] == [torch.bfloat16, torch.float32, torch.bfloat16]
    torch.testing.assert_close(lists[0][1].double(), expected_w, rtol=1e-2, atol=1e-2)
    lion_step([], [], [], lr=0.1)


def test_bad_input_is_named() -> None:
    x = drawn(2, 6)
    with pytest.raises(
        ConfigError,
        match=r"rms_norm: weight is torch.float64 \[5\] on cpu, expected floating \(6,\)",
    ):
        rms_norm(x, drawn(5))
    with pytest.raises(ConfigError, match=r"layer_norm: x is torch.int64 of shape \(3,\), expected a floating"):
        layer_norm(torch.arange(3))
    with pytest.raises(ConfigError, match=r"add_rms_norm: residual is torch.float32 .* expected torch.float64"):
        add_rms_norm(x, x.float())
    with pytest.raises(
        ConfigError, match=r"swiglu: gate is torch.float64 of shape \(2, 6\).*two floating tensors alike"
    ):
        swiglu(x, x[:1])
    with pytest.raises(ConfigError, match=r"shape \(2, 5\), expected a floating dtype and an even last axis"):
        swiglu(x[:, :5])
    heads = drawn(1, 4, 3, 6)
    with pytest.raises(ConfigError, match=r"expected both floating \[G, 3, 3\].*G a divisor of 4"):
        rope(heads, *tables(3, 3, 3))
    with pytest.raises(ConfigError, match=r"expected floating \[B, N, T, D\] with even D"):
        rope(heads[..., :5], *tables(1, 3, 3))
    with pytest.raises(ConfigError, match=r"cos and sin require gradients"):
        rope(heads, *(table.requires_grad_() for table in tables(1, 3, 3)))
    with pytest.raises(ConfigError, match=r"activation='tanh' unknown; use one of: relu, gelu, silu"):
        norm_dropout_activation(x, activation="tanh")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"p=1.5, expected a probability"):
        norm_dropout_activation(x, activation="relu", p=1.5)
    with pytest.raises(ConfigError, match=r"\(1, 1, 0\) parameters, momenta and gradients"):
        lion_step([x], [x], [], lr=0.1)
    with pytest.raises(
        ConfigError,
        match=r"gradient 0 is torch.float64 of shape \(6, 2\), strides \(1, 6\).*expected contiguous floating \(2, 6\)",
    ):
        lion_step([x], [x.clone()], [x.t()], lr=0.1)
