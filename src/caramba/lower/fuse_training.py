"""Pass `fuse_training`: linear layers of one input as one product of a compiled training step."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from caramba.layer.projection import StandardProjection
from caramba.layer.swiglu import SwiGLULayer
from caramba.lower.float8 import Float8Linear, Float8Recipe, float8_linear
from caramba.lower.float8_swiglu import Float8SwiGLU
from caramba.lower.fuse_linears import FUSIBLE, PackedGateUp, PackedQkv
from caramba.lower.lowering import Replaced, has_hooks, replace_each

FUSED_DEVICES = frozenset({"cuda"})
"""Devices whose matrix products are worth fusing: elsewhere it changes the order of sums and saves nothing."""
MIN_ROWS = 1024
"""Below it the copy that puts the weights side by side costs more than a larger product saves."""


class TrainingQkv(PackedQkv):
    """A projection whose queries, keys and values are one product of a training step."""

    def project_packed(self, x: Tensor) -> Tensor | None:
        together = fused_product(x, (self.q, self.k, self.v))
        return super().project_packed(x) if together is None else together

    def linears(self, x: Tensor, rows: Tensor | None) -> tuple[Tensor, ...]:
        found = products(x, (self.q, self.k, self.v)) if rows is None else None
        return super().linears(x, rows) if found is None else found


class TrainingGateUp(PackedGateUp):
    """A gated network whose gate and up are one product of a training step."""

    def project_packed(self, x: Tensor) -> Tensor | None:
        together = fused_product(x, (self.gate, self.up))
        return super().project_packed(x) if together is None else together

    def linears(self, x: Tensor) -> tuple[Tensor, ...]:
        found = products(x, (self.gate, self.up))
        return super().linears(x) if found is None else found


FAST: dict[type[nn.Module], type[nn.Module]] = {StandardProjection: TrainingQkv, SwiGLULayer: TrainingGateUp}
"""A latent layer's linear layers are not fused here: the latent and the geometric key are fused by `latent_keys`."""


def fuse_training(model: nn.Module, *, is_compiled: bool) -> list[Replaced]:
    """Lower what owns plain linear layers of one input, or layers of one float8 recipe; return it.

    None where products are not worth fusing. Layers that are replaced, sharded, quantised or hooked are not fused.
    """
    weight = next(model.parameters(), None)
    if weight is None or weight.device.type not in FUSED_DEVICES:
        return []
    return [
        one
        for kind, fast in FAST.items()
        for one in replace_each(
            model,
            kind,
            fast,
            lambda module, names=FUSIBLE[kind][0]: (
                not isinstance(module, Float8SwiGLU) and are_joinable([module.get_submodule(name) for name in names])
            ),
        )
    ]


def are_joinable(layers: Sequence[nn.Module]) -> bool:
    """True if layers are plain, or all of one float8 recipe, and alike in their biases."""
    first = layers[0]
    return all(
        type(layer) in (nn.Linear, Float8Linear)
        and _recipe(layer) is _recipe(first)
        and type(layer.weight) is nn.Parameter
        and (layer.bias is None) == (first.bias is None)
        and not has_hooks(layer)
        for layer in layers
    )


def products(x: Tensor, layers: Sequence[nn.Linear]) -> tuple[Tensor, ...] | None:
    """Return W_i x + b_i of every layer by one product, else None. Shape: x [..., M] to [..., N_i] each."""
    together = fused_product(x, layers)
    return None if together is None else together.split([layer.out_features for layer in layers], dim=-1)


def fused_product(x: Tensor, layers: Sequence[nn.Linear]) -> Tensor | None:
    """Return [W_1; W_2; ...] x + [b_1; b_2; ...] of layers that train alike on enough rows, else None.

    One product reads x once (and casts it once, where it is of float8 numbers), fills the device where a narrow layer
    does not, and its backward makes the gradient of x without adding up those of the layers. The copy of the weights is
    one pass over them, fused by the compiler with the cast to 16 bits where there is one. Parameters and their names
    stay as they are.

    Shape: x [..., M] -> [..., sum of N_i].
    """
    first = layers[0]
    if not torch.is_grad_enabled() or x.numel() < MIN_ROWS * x.shape[-1]:
        return None
    if not all(layer.weight.requires_grad and layer.weight.dtype == first.weight.dtype for layer in layers):
        return None
    weight = torch.cat(tuple(layer.weight for layer in layers))
    biases = [layer.bias for layer in layers if layer.bias is not None]
    bias = torch.cat(tuple(biases)) if biases else None
    if isinstance(first, Float8Linear):
        return float8_linear(x, weight, bias, first.recipe)
    return F.linear(x, weight, bias)


def _recipe(layer: nn.Module) -> Float8Recipe | None:
    return layer.recipe if isinstance(layer, Float8Linear) else None
