"""Pass `fuse_linears`: fused QKV and gate-up, the weights of linear layers with one input in one allocation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from caramba.layer.fused_linear import FusedLinear, HasFusibleLinears, has_fusible_linears, uses_fused_linears
from caramba.layer.quantized_linear import QuantizedLinear
from caramba.layer.small_batch import has_hooks
from caramba.lower.replaced import Replaced
from caramba.ops import has_kernel


def fuse_linears(model: nn.Module, *, is_compiled: bool) -> list[Replaced]:
    """Fuse linear layers that share an input; return the modules that own them.

    Weights and biases move once into one allocation, and each parameter becomes a view of it: no copy is kept, names
    and values do not change, and an optimiser still updates the parameters in place. CUDA graphs captured under one
    lowering stay valid under the next, because the memory is reused. Layers without a bias get zeros if another has
    one.

    Replaced, sharded, hooked or mismatched layers are not fused. `is_compiled` is True for compiled forwards, which
    use the fused GEMM on CUDA too; eager CUDA forwards use it only through the small-batch kernel.
    """
    replaced: list[Replaced] = []
    for module in model.modules():
        owner = module
        if has_fusible_linears(owner) and owner.fused_linear is None:
            layers = [owner.get_submodule(name) for name in owner.fusible_linears]
            owner.fused_linear = _fuse(layers, is_compiled)
            if owner.fused_linear is not None:
                replaced.append(Replaced(module, lambda owner=owner: _unfuse(owner)))
    return replaced


def _unfuse(owner: HasFusibleLinears) -> None:
    owner.fused_linear = None


def _fuse(layers: Sequence[nn.Module], is_compiled: bool) -> FusedLinear | None:
    plain = [layer for layer in layers if is_unmodified_linear(layer)]
    first = plain[0].weight if plain else None
    if first is None or len(plain) < len(layers):
        return None
    if not uses_fused_linears(first.device, is_compiled=is_compiled) and not has_kernel(
        "small_batch_linear", first
    ):
        return None
    like = (first.dtype, first.device, first.shape[1], first.requires_grad)
    biases = [layer.bias for layer in plain if layer.bias is not None]
    for layer in plain:
        weight = layer.weight
        if (weight.dtype, weight.device, weight.shape[1], weight.requires_grad) != like:
            return None
    if any(bias.dtype != biases[0].dtype for bias in biases):
        return None
    scales = [layer.scale for layer in plain if isinstance(layer, QuantizedLinear)]
    if any(scale.shape[1:] != scales[0].shape[1:] for scale in scales):
        return None
    # Tensors created under inference_mode could not be trained later.
    with torch.inference_mode(False), torch.no_grad():
        weight = _concatenate([layer.weight for layer in plain])
        bias = _concatenate([_bias_of(layer, biases[0].dtype) for layer in plain]) if biases else None
        scale = _concatenate(scales) if scales else None
    return FusedLinear(weight, bias, [layer.weight.shape[0] for layer in plain], scale)


_zeros: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()


def _bias_of(layer: nn.Linear | QuantizedLinear, dtype: torch.dtype) -> Tensor:
    """Return a layer's bias, or zeros cached for the layer, so that they are allocated once."""
    if layer.bias is not None:
        return layer.bias
    weight, zeros = layer.weight, _zeros.get(layer)
    like = (weight.shape[0], dtype, weight.device)
    if zeros is None or (zeros.shape[0], zeros.dtype, zeros.device) != like:
        zeros = _zeros[layer] = weight.new_zeros(weight.shape[0], dtype=dtype)
    return zeros


def is_unmodified_linear(layer: nn.Module) -> TypeGuard[nn.Linear | QuantizedLinear]:
    """True for an `nn.Linear` or `QuantizedLinear` without hooks, adapters, sharding or an overridden forward."""
    if type(layer) is QuantizedLinear:
        alike = layer.reduce is None
    elif type(layer) is nn.Linear:
        alike = layer.bias is None or layer.bias.dtype == layer.weight.dtype
    else:
        return False
    device = layer.weight.device
    return (
        alike
        and not has_hooks(layer)
        and all(
            type(one) is nn.Parameter and one.device == device and not one.is_meta and not one.is_inference()
            for one in layer.parameters()
        )
    )


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Return parts [N_i, ...] as one tensor that shares their memory; move parts into one allocation if needed."""
    first = parts[0]
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    place, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for part in parts:
        if (
            not part.is_contiguous()
            or part.untyped_storage().data_ptr() != storage
            or part.data_ptr() != place
        ):
            break
        place += part.nbytes
    else:
        return first.detach().as_strided(shape, first.stride(), first.storage_offset())
    together = torch.cat([part.detach() for part in parts])
    for part, moved in zip(parts, together.split([part.shape[0] for part in parts]), strict=True):
        part.data = moved
    return together
