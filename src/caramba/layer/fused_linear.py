"""Linear layers of one input as one matrix product: fused weights, and products of a compiled training step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from caramba.layer.float8 import Float8Linear, Float8Recipe, float8_linear
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


FUSED_DEVICES = frozenset({"cuda"})
"""Devices whose matrix products are worth joining: elsewhere it changes the order of sums and saves nothing."""
MIN_ROWS = 1024
"""Below it the copy that puts the weights side by side costs more than a larger product saves."""


def products(x: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """Return W_i x + b_i of every layer, as one product where `fused_product` makes it.

    Shape: x [..., M] -> [..., N_i] each.
    """
    together = fused_product(x, layers)
    if together is None:
        return tuple(layer(x) for layer in layers)
    return together.split([layer.out_features for layer in layers], dim=-1)


def fused_product(x: Tensor, layers: Sequence[nn.Linear]) -> Tensor | None:
    """Return [W_1; W_2; ...] x + [b_1; b_2; ...] in a compiled training step on CUDA, else None.

    One product reads x once (and casts it once, where it is of float8 numbers), fills the device where a narrow layer
    does not, and its backward makes the gradient of x without adding up those of the layers. The copy of the weights is
    one pass over them, joined by the compiler with the cast to 16 bits where there is one. Parameters and their names
    stay as they are.

    Shape: x [..., M] -> [..., sum of N_i].
    """
    if not _can_fuse(x, layers):
        return None
    weight = torch.cat(tuple(layer.weight for layer in layers))
    biases = [layer.bias for layer in layers if layer.bias is not None]
    bias = torch.cat(tuple(biases)) if biases else None
    first = layers[0]
    if isinstance(first, Float8Linear):
        return float8_linear(x, weight, bias, first.recipe)
    return F.linear(x, weight, bias)


def _can_fuse(x: Tensor, layers: Sequence[nn.Linear]) -> bool:
    """Whether the layers are plain, or all of one float8 recipe, train alike, and have enough rows. Nothing that
    replaces, shards, quantises, hooks or freezes one of them is passed by."""
    if x.device.type not in FUSED_DEVICES or not (torch.compiler.is_compiling() and torch.is_grad_enabled()):
        return False
    first = layers[0]
    return x.numel() >= MIN_ROWS * x.shape[-1] and all(
        type(layer) in (nn.Linear, Float8Linear)
        and _recipe(layer) is _recipe(first)
        and type(layer.weight) is nn.Parameter
        and layer.weight.requires_grad
        and layer.weight.dtype == first.weight.dtype
        and (layer.bias is None) == (first.bias is None)
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
        for layer in layers
    )


def _recipe(layer: nn.Linear) -> Float8Recipe | None:
    return layer.recipe if isinstance(layer, Float8Linear) else None
