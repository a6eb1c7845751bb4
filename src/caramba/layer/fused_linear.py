"""Fused linear layers: weights that share one input (q, k, v or gate, up) concatenated in memory for one GEMM."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple, Protocol, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from caramba.layer.quantized_linear import QuantizedLinear, linear
from caramba.layer.small_batch import has_hooks
from caramba.ops import has_kernel
from caramba.ops.decode_arguments import MAX_QUERIES


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
        fused_linear: the fused layers inside `fuse_linears`, otherwise None.
    """

    fusible_linears: ClassVar[tuple[str, ...]]
    fuse_in_training: ClassVar[bool]
    fused_linear: FusedLinear | None

    def get_submodule(self, target: str) -> nn.Module: ...


class HasFastPath(Protocol):
    """A module that may have a faster forward for decode steps of one token.

    `fuse_linears` calls `decode_fast_path` once and stores its result in `fast_path` until the block ends.
    """

    fast_path: object | None

    def decode_fast_path(self) -> object | None: ...


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


@contextlib.contextmanager
def fuse_linears(module: nn.Module, *, is_compiled: bool = False) -> Iterator[None]:
    """Fuse linear layers that share an input, for the length of a block without gradients.

    Weights and biases move once into one allocation, and each parameter becomes a view of it: no copy is kept, names
    and values do not change, and an optimiser still updates the parameters in place. CUDA graphs captured in one block
    stay valid in the next, because the memory is reused. Layers without a bias get zeros if another has one.

    Inside the block no weight or layer may be replaced or hooked. Replaced, sharded, hooked or mismatched layers are
    not fused. `is_compiled` is True if the block runs compiled forwards, which use the fused GEMM on CUDA too; eager
    CUDA forwards use it only through the small-batch kernel.
    """
    owners = [
        owner for owner in module.modules() if has_fusible_linears(owner) and owner.fused_linear is None
    ]
    fast_path_owners: list[HasFastPath] = []
    try:
        for owner in owners:
            owner.fused_linear = _fuse(
                [owner.get_submodule(name) for name in owner.fusible_linears], is_compiled
            )
        if not is_compiled:
            _set_fast_paths(module, fast_path_owners)
        yield
    finally:
        for owner in owners:
            owner.fused_linear = None
        for fast_path_owner in fast_path_owners:
            fast_path_owner.fast_path = None


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


# Runs for every module before every prompt. `isinstance` with a protocol is slow: it collects the members each time.
def has_fusible_linears(module: nn.Module) -> TypeGuard[HasFusibleLinears]:
    """True if a module declares `fusible_linears`."""
    return hasattr(type(module), "fusible_linears")


def _has_fast_path(module: nn.Module) -> TypeGuard[HasFastPath]:
    return hasattr(type(module), "decode_fast_path")


def _set_fast_paths(module: nn.Module, found: list[HasFastPath]) -> None:
    """Set `fast_path` of the outermost modules that have one, and append them to `found`."""
    children = list(module.children())
    if _has_fast_path(module):
        if module.fast_path is None:
            module.fast_path = module.decode_fast_path()
            if module.fast_path is not None:
                found.append(module)
        if module.fast_path is not None:  # set here or by an outer block
            return
    for child in children:
        _set_fast_paths(child, found)


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
