"""Linear layers of one input as one matrix product, where a compiled training step is faster for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from caramba.layer.float8 import Float8Linear, Float8Recipe, float8_linear

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
