"""The op `caramba::norm_dropout_activation`: layer normalisation, dropout and an activation in one pass."""

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import call_op, caramba_op, check_rows, direct, empty_upcast, upcast
from caramba.ops.layer_norm import fake_gradients, normalise, normalise_backward, scale_and_shift
from caramba.ops.philox import dropout_mask, resolve_probability

Activation = Literal["relu", "gelu", "silu"]


def norm_dropout_activation(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    activation: Activation,
    eps: float = 1e-5,
    p: float = 0.0,
    seed: int | None = None,
    training: bool = True,
) -> Tensor:
    """Return f(dropout(layer_norm(x))) with f of relu, gelu (exact) or silu, in at least fp32, rounded once.

    Dropout zeroes an element with probability p, taken to the nearest 1 / 65536 (below 1 / 131072 to none), and scales
    the others by 1 / (1 - p). Which it zeroes is a function of `seed` and the element's place alone, so the backward
    draws it again and nothing is stored; without a seed one is taken from torch's generator of the CPU. Out of training
    it is left out. A kernel's gelu in bf16 has a relative error of 2.5e-4, an eighth of half a unit in the last place,
    down to -5.5, and an absolute one of 1e-7 below; its slope one of 1.3e-4.

    Shape: x [..., D], weight and bias [D] or none, to [..., D], contiguous, in x's dtype.

    Raises:
        ConfigError: as `layer_norm`, an unknown activation, p outside [0, 1], or a seed that is no int64.

    Reference: Ba et al., 2016, arXiv:1607.06450; Srivastava et al., 2014, JMLR 15(56).
    """
    check_rows("norm_dropout_activation", x, weight=weight, bias=bias)
    if activation not in get_args(Activation):
        raise ConfigError(
            f"norm_dropout_activation: activation={activation!r} unknown; use one of: {', '.join(get_args(Activation))}"
        )
    if not 0.0 <= p <= 1.0:
        raise ConfigError(f"norm_dropout_activation: p={p}, expected a probability from 0 to 1")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63):
        raise ConfigError(f"norm_dropout_activation: seed={seed!r}, expected an integer of 64 bits")
    p = resolve_probability(p) if training else 0.0
    if p == 0.0:
        p, seed = 0.0, 0
    elif seed is None:
        seed = int(torch.randint(2**62, (1,)))
    run = direct("norm_dropout_activation", x, weight, bias) or torch.ops.caramba.norm_dropout_activation.default
    return run(x, weight, bias, eps, p, seed, activation)[0]


def _dropped(x: Tensor, p: float, seed: int) -> Tensor:
    """Return x [..., D] with dropout; it is its own gradient."""
    if p == 0.0:
        return x
    mask = dropout_mask(seed, p, x.shape[:-1].numel(), x.shape[-1], x.device).view(x.shape)
    return torch.where(mask, x * (1.0 / (1.0 - p) if p < 1.0 else 0.0), torch.zeros_like(x))


def _activated(x: Tensor, activation: str) -> Tensor:
    return {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}[activation](x)


def _slope(x: Tensor, activation: str) -> Tensor:
    """Return the derivative of the activation; that of relu at 0 is 0."""
    if activation == "relu":
        return (x > 0).to(x.dtype)
    if activation == "silu":
        share = torch.sigmoid(x)
        return share * (1 + x * (1 - share))
    density = torch.exp(-0.5 * x * x) * 0.3989422804014327
    return 0.5 * (1 + torch.erf(x * 0.7071067811865476)) + x * density


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _, ctx.p, ctx.seed, ctx.activation = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, output[1], output[2], weight, bias)


def _backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    x, mean, rstd, weight, bias = ctx.saved_tensors
    if grad is None:
        return (None,) * 7
    grad_x, grad_weight, grad_bias = call_op(
        "norm_dropout_activation_backward", grad, x, mean, rstd, weight, bias, ctx.p, ctx.seed, ctx.activation
    )
    vectors = (None if weight is None else grad_weight, None if bias is None else grad_bias)
    return grad_x, *vectors, None, None, None, None


@caramba_op(
    "norm_dropout_activation",
    fake=lambda x, *_: (x.new_empty(x.shape), empty_upcast(x, x.shape[:-1]), empty_upcast(x, x.shape[:-1])),
    setup=_setup,
    backward=_backward,
)
def reference_norm_dropout_activation(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, p: float, seed: int, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the op in plain PyTorch: (y, mean [...], rstd [...])."""
    unit, mean, rstd = normalise(x, eps)
    y = _activated(_dropped(scale_and_shift(unit, weight, bias), p, seed), activation)
    return y.to(x.dtype).contiguous(), mean, rstd


@caramba_op(
    "norm_dropout_activation_backward",
    fake=lambda grad, x, mean, rstd, weight, bias, *_: fake_gradients(x, weight, bias),
)
def reference_norm_dropout_activation_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    p: float,
    seed: int,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (dx, dweight, dbias) in plain PyTorch, from x alone."""
    unit = (upcast(x) - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
    before = _dropped(scale_and_shift(unit, weight, bias), p, seed)
    inner = _dropped(upcast(grad) * _slope(before, activation), p, seed)
    grad_x, grad_weight, grad_bias = normalise_backward(inner, x, mean, rstd, weight, bias)
    return grad_x.to(x.dtype).contiguous(), grad_weight, grad_bias
