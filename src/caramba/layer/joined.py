"""Weights of linear layers that read one input, side by side in memory, so that a decode step makes one product."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple, Protocol, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from caramba.layer.coded import CodedLinear, linear
from caramba.layer.small_batch import has_hooks
from caramba.ops import MAX_QUERIES, has_kernel


class Joined(NamedTuple):
    """[W_1; W_2; ...] and the biases of layers side by side, with the features of each; with a scale W_i are codes."""

    weight: Tensor
    bias: Tensor | None
    widths: list[int]
    scale: Tensor | None = None

    def product(self, x: Tensor) -> Tensor:
        """Return W_i x + b_i of every layer side by side. Shape: [..., M] to [..., sum of N_i]."""
        return linear(x, self.weight, self.bias, self.scale)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return W_i x + b_i of every layer. Shape: [..., M] to [..., N_i] each."""
        return self.product(x).split_with_sizes(self.widths, dim=-1)


class Joins(Protocol):
    """A module with linear layers of one input: `joins` names them, `joined` is set while they are joined, and
    `joins_to_train` says whether a compiled training step makes one product of them too."""

    joins: ClassVar[tuple[str, ...]]
    joins_to_train: ClassVar[bool]
    joined: Joined | None

    def get_submodule(self, target: str) -> nn.Module: ...


class FindsSteps(Protocol):
    """A module whose forwards of one token run by calls of their own, which it looks for once in every block."""

    step: object | None

    def find_step(self) -> object | None: ...


def usable(joined: Joined | None, x: Tensor) -> TypeGuard[Joined]:
    """Whether a forward takes the joined product: without gradients, and of eager CUDA code none, as its kernels read
    whole rows and would copy the parts."""
    is_wanted = joined is not None and not torch.is_grad_enabled()
    return is_wanted and joins_on(x.device, is_compiled=torch.compiler.is_compiling())


def prompt_product(joined: Joined | None, x: Tensor) -> Tensor | None:
    """Return the joined product of prompts in an eager forward without gradients, for kernels that read it whole.

    None for steps of few tokens, whose products were measured apart, and where nothing is joined.

    Shape: x [B, T, M] to [B, T, sum of N_i].
    """
    if joined is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    return joined.product(x) if x.dim() == 3 and x.shape[1] > MAX_QUERIES else None


def joins_on(device: torch.device, *, is_compiled: bool) -> bool:
    """Whether forwards on a device take joined products."""
    return is_compiled or device.type != "cuda"


@contextlib.contextmanager
def joined_weights(module: nn.Module, *, is_compiled: bool = False) -> Iterator[None]:
    """Run a block without gradients in which layers of one input run as one product.

    Their weights and biases move once into memory where they lie side by side, each parameter a part of it, so nothing
    is held twice and the parameters stay themselves: names, values, and what an optimiser changes in place. What was
    captured in one block reads the same memory in the next. Inside the block no weight or layer may be replaced or
    hooked. Where some layers have a bias the others get zeros for one. Layers that are not plain, or unlike each other,
    run as ever, and so do those of forwards that would take no joined product: `is_compiled` says whether the block
    runs compiled ones. Where products of few rows have a kernel it reads them.
    """
    owners = [owner for owner in module.modules() if is_joining(owner) and owner.joined is None]
    steppers: list[FindsSteps] = []
    try:
        for owner in owners:
            owner.joined = _join([owner.get_submodule(name) for name in owner.joins], is_compiled)
        if not is_compiled:
            _look_for_steps(module, steppers)
        yield
    finally:
        for owner in owners:
            owner.joined = None
        for stepper in steppers:
            stepper.step = None


def _join(layers: Sequence[nn.Module], is_compiled: bool) -> Joined | None:
    plain = [layer for layer in layers if is_plain_linear(layer)]
    first = plain[0].weight if plain else None
    if first is None or len(plain) < len(layers):
        return None
    if not joins_on(first.device, is_compiled=is_compiled) and not has_kernel("row_linear", first):
        return None
    like = (first.dtype, first.device, first.shape[1], first.requires_grad)
    biases = [layer.bias for layer in plain if layer.bias is not None]
    for layer in plain:
        weight = layer.weight
        if (weight.dtype, weight.device, weight.shape[1], weight.requires_grad) != like:
            return None
    if any(bias.dtype != biases[0].dtype for bias in biases):
        return None
    scales = [layer.scale for layer in plain if isinstance(layer, CodedLinear)]
    if any(scale.shape[1:] != scales[0].shape[1:] for scale in scales):
        return None
    # What is made under inference_mode could not be trained later.
    with torch.inference_mode(False), torch.no_grad():
        weight = _side_by_side([layer.weight for layer in plain])
        bias = _side_by_side([_bias_of(layer, biases[0].dtype) for layer in plain]) if biases else None
        scale = _side_by_side(scales) if scales else None
    return Joined(weight, bias, [layer.weight.shape[0] for layer in plain], scale)


_zeros: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()


def _bias_of(layer: nn.Linear | CodedLinear, dtype: torch.dtype) -> Tensor:
    """Return a layer's bias; of one without any zeros that stay its own, so that they too move once."""
    if layer.bias is not None:
        return layer.bias
    weight, zeros = layer.weight, _zeros.get(layer)
    like = (weight.shape[0], dtype, weight.device)
    if zeros is None or (zeros.shape[0], zeros.dtype, zeros.device) != like:
        zeros = _zeros[layer] = weight.new_zeros(weight.shape[0], dtype=dtype)
    return zeros


# Asked of every module before every text, so by the class: `isinstance` of a protocol gathers its members each time.
def is_joining(module: nn.Module) -> TypeGuard[Joins]:
    """Whether a module names layers that may be joined."""
    return hasattr(type(module), "joins")


def _has_steps(module: nn.Module) -> TypeGuard[FindsSteps]:
    return hasattr(type(module), "find_step")


def _look_for_steps(module: nn.Module, found: list[FindsSteps]) -> None:
    """Set `step` of the outermost modules that have one, and add them to `found`."""
    children = list(module.children())
    if _has_steps(module):
        if module.step is None:
            module.step = module.find_step()
            if module.step is not None:
                found.append(module)
        if module.step is not None:  # or of a block around this one
            return
    for child in children:
        _look_for_steps(child, found)


def is_plain_linear(layer: nn.Module) -> TypeGuard[nn.Linear | CodedLinear]:
    """Whether a layer is what it seems: its product is of its own weight, or codes, and bias, and nobody watches it or
    has given it another forward."""
    if type(layer) is CodedLinear:
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


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Return parts [N_i, ...] as one tensor in whose memory they lie, moving them where they do not."""
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
