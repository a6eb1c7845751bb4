"""The ops `caramba::swiglu` and `caramba::swiglu_packed`: silu(gate) * up, forward and backward."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import call_op, caramba_op, direct, upcast


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up with silu(g) = g sigmoid(g), in at least fp32, rounded once.

    The backward recomputes both from the inputs. Without `up` the first argument holds both, gate first, on its
    last axis.

    Shape: gate and up [..., F], or gate [..., 2F] alone, to [..., F], contiguous, in gate's dtype.

    Raises:
        ConfigError: gate and up that differ in shape, dtype or device, or a packed tensor of odd width.

    Reference: Shazeer, 2020, arXiv:2002.05202.
    """
    if up is None:
        if not gate.is_floating_point() or gate.dim() < 1 or gate.shape[-1] % 2:
            raise ConfigError(
                f"swiglu: packed gate and up are {gate.dtype} of shape {tuple(gate.shape)}, expected a floating "
                "dtype and an even last axis"
            )
        return (direct("swiglu_packed", gate) or torch.ops.caramba.swiglu_packed.default)(gate)
    if not gate.is_floating_point() or (gate.shape, gate.dtype, gate.device) != (
        up.shape,
        up.dtype,
        up.device,
    ):
        raise ConfigError(
            f"swiglu: gate is {gate.dtype} of shape {tuple(gate.shape)} on {gate.device}, up {up.dtype} of shape "
            f"{tuple(up.shape)} on {up.device}; expected two floating tensors alike"
        )
    return (direct("swiglu", gate, up) or torch.ops.caramba.swiglu.default)(gate, up)


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return call_op("swiglu_backward", grad, *ctx.saved_tensors)


def _packed_backward(ctx: Any, grad: Tensor) -> Tensor:
    return call_op("swiglu_packed_backward", grad, *ctx.saved_tensors)


@caramba_op("swiglu", fake=lambda gate, *_: gate.new_empty(gate.shape), setup=_setup, backward=_backward)
def reference_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute the op in plain PyTorch."""
    return (F.silu(upcast(gate)) * upcast(up)).to(gate.dtype).contiguous()


@caramba_op(
    "swiglu_packed",
    fake=lambda packed: packed.new_empty((*packed.shape[:-1], packed.shape[-1] // 2)),
    setup=_setup,
    backward=_packed_backward,
)
def reference_swiglu_packed(packed: Tensor) -> Tensor:
    """Compute the op in plain PyTorch."""
    return reference_swiglu(*packed.chunk(2, dim=-1))


def _gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the wide gradients: with s = sigmoid(gate), dgate = grad up s (1 + gate (1 - s)), dup = grad gate s."""
    wide, gate, up = upcast(grad), upcast(gate), upcast(up)
    share = torch.sigmoid(gate)
    return wide * up * share * (1 + gate * (1 - share)), wide * gate * share


@caramba_op("swiglu_backward", fake=lambda grad, gate, up: (gate.new_empty(gate.shape), up.new_empty(up.shape)))
def reference_swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Compute (dgate, dup) in plain PyTorch."""
    grad_gate, grad_up = _gradients(grad, gate, up)
    return grad_gate.to(gate.dtype).contiguous(), grad_up.to(up.dtype).contiguous()


@caramba_op("swiglu_packed_backward", fake=lambda grad, packed: packed.new_empty(packed.shape))
def reference_swiglu_packed_backward(grad: Tensor, packed: Tensor) -> Tensor:
    """Compute the gradient of both halves in plain PyTorch."""
    return torch.cat(_gradients(grad, *packed.chunk(2, dim=-1)), dim=-1).to(packed.dtype).contiguous()
