"""Fused linear layers: weights that share one input (q, k, v or gate, up) concatenated in memory for one GEMM."""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from caramba.layer.quantized_linear import QuantizedLinear, linear
from caramba.layer.rms_norm import RMSNorm
from caramba.ops.decode_arguments import MAX_QUERIES
from caramba.ops.small_batch_linear import small_batch_linear


class FusedLinear(NamedTuple):
    """Concatenated weights and biases of linear layers that share one input.

    Attributes:
        weight: [sum of N_i, M]; integer codes where `scale` is set.
        bias: [sum of N_i] or None.
        widths: output features N_i of each layer.
        scale: dequantisation scales, as in `QuantizedLinear`, or None.
    """

    weight: Tensor
    bias: Tensor | None
    widths: list[int]
    scale: Tensor | None = None

    def product(self, x: Tensor) -> Tensor:
        """Return the outputs W_i x + b_i of all layers, concatenated. Shape: [..., M] to [..., sum of N_i]."""
        return linear(x, self.weight, self.bias, self.scale)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return W_i x + b_i of every layer. Shape: [..., M] to [..., N_i] each."""
        return self.product(x).split_with_sizes(self.widths, dim=-1)


class HasFusibleLinears(Protocol):
    """A module whose linear layers share one input and can be fused.

    Attributes:
        fusible_linears: names of these layers, in the order of their output features.
        fuse_in_training: True if a compiled training step fuses them too.
        fused_linear: the fused layers while `caramba.lower` has fused them, otherwise None.
    """

    fusible_linears: ClassVar[tuple[str, ...]]
    fuse_in_training: ClassVar[bool]
    fused_linear: FusedLinear | None

    def get_submodule(self, target: str) -> nn.Module: ...


def can_use_fused(fused_linear: FusedLinear | None, x: Tensor) -> TypeGuard[FusedLinear]:
    """True if a forward may use the fused GEMM: no gradients, and not eager on CUDA.

    Eager CUDA kernels read contiguous rows and would copy the split outputs.
    """
    is_wanted = fused_linear is not None and not torch.is_grad_enabled()
    return is_wanted and uses_fused_linears(x.device, is_compiled=torch.compiler.is_compiling())


def fused_prefill_product(fused_linear: FusedLinear | None, x: Tensor) -> Tensor | None:
    """Return the fused GEMM output of a prefill in eager mode without gradients, unsplit.

    None for decode steps, which `can_use_fused` decides, and where `fused_linear` is None.

    Shape: x [B, T, M] to [B, T, sum of N_i].
    """
    if fused_linear is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    return fused_linear.product(x) if x.dim() == 3 and x.shape[1] > MAX_QUERIES else None


def uses_fused_linears(device: torch.device, *, is_compiled: bool) -> bool:
    """True if forwards on a device use fused linears."""
    return is_compiled or device.type != "cuda"


# Runs for every module before every prompt. `isinstance` with a protocol is slow: it collects the members each time.
def has_fusible_linears(module: nn.Module) -> TypeGuard[HasFusibleLinears]:
    """True if a module declares `fusible_linears`."""
    return hasattr(type(module), "fusible_linears")


def norm_linear(
    layer: nn.Linear | QuantizedLinear | FusedLinear, x: Tensor, norm: RMSNorm, *, gated: bool = False
) -> Tensor:
    """Return layer(norm(x)), or silu(gate) * up of a fused layer if `gated`. Shape: [..., M] to [..., N]."""
    scale = None if isinstance(layer, nn.Linear) else layer.scale
    return small_batch_linear(
        x, layer.weight, layer.bias, scale=scale, norm=norm.weight, eps=norm.eps, gated=gated
    )


def linear_residual(layer: nn.Linear | QuantizedLinear, x: Tensor, residual: Tensor) -> Tensor:
    """Return residual + layer(x). Shape: [..., M] and [..., N] to [..., N]."""
    scale = None if isinstance(layer, nn.Linear) else layer.scale
    return small_batch_linear(x, layer.weight, layer.bias, scale=scale, residual=residual)
