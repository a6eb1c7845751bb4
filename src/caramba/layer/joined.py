"""Weights of linear layers that read one input, side by side in memory, so that a decode step makes one product."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple, Protocol, TypeGuard, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Joined(NamedTuple):
    """[W_1; W_2; ...] and the biases of layers side by side, with the features of each."""

    weight: Tensor
    bias: Tensor | None
    widths: list[int]

    def product(self, x: Tensor) -> Tensor:
        """Return W_i x + b_i of every layer side by side. Shape: [..., M] to [..., sum of N_i]."""
        return F.linear(x, self.weight, self.bias)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return W_i x + b_i of every layer. Shape: [..., M] to [..., N_i] each."""
        return self.product(x).split_with_sizes(self.widths, dim=-1)


@runtime_checkable
class Joins(Protocol):
    """A module with linear layers of one input: `joins` names them, `joined` is set while they are joined."""

    joins: ClassVar[tuple[str, ...]]
    joined: Joined | None


def usable(joined: Joined | None, x: Tensor) -> TypeGuard[Joined]:
    """Whether a forward takes the joined product: without gradients, and of eager CUDA code none, as its kernels read
    whole rows and would copy the parts."""
    is_wanted = joined is not None and not torch.is_grad_enabled()
    return is_wanted and (not x.is_cuda or torch.compiler.is_compiling())


@contextlib.contextmanager
def joined_weights(module: nn.Module) -> Iterator[None]:
    """Run a block without gradients in which layers of one input run as one product.

    Their weights move once into memory where they lie side by side, each parameter a part of it, so nothing is held
    twice and the parameters stay themselves: names, values, and what an optimiser changes in place. Inside the block
    no weight may be replaced. Layers that are not plain, or unlike each other, run as ever.
    """
    owners = [owner for owner in module.modules() if isinstance(owner, Joins) and owner.joined is None]
    try:
        for owner in owners:
            assert isinstance(owner, nn.Module)
            owner.joined = _join([owner.get_submodule(name) for name in owner.joins])
        yield
    finally:
        for owner in owners:
            owner.joined = None


def _join(layers: Sequence[nn.Module]) -> Joined | None:
    plain = [layer for layer in layers if _is_plain(layer)]
    first = plain[0].weight if plain else None
    if first is None or len(plain) < len(layers):
        return None
    like = (first.dtype, first.device, first.shape[1], first.requires_grad, plain[0].bias is None)
    for layer in plain:
        weight = layer.weight
        if (weight.dtype, weight.device, weight.shape[1], weight.requires_grad, layer.bias is None) != like:
            return None
    # What is made under inference_mode could not be trained later.
    with torch.inference_mode(False), torch.no_grad():
        biases: list[Tensor] = [layer.bias for layer in plain if layer.bias is not None]
        weight = _side_by_side([layer.weight for layer in plain])
        bias = torch.cat(biases) if biases else None
    return Joined(weight, bias, [layer.weight.shape[0] for layer in plain])


def _is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    return (
        type(layer) is nn.Linear
        and type(layer.weight) is nn.Parameter
        and not layer.weight.is_meta
        and not layer.weight.is_inference()
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
    )


def _side_by_side(weights: Sequence[Tensor]) -> Tensor:
    """Return weights [N_i, M] as one tensor [sum of N_i, M] in whose memory they lie, moving them where they do not."""
    first = weights[0]
    n_rows, width = sum(weight.shape[0] for weight in weights), first.shape[1]
    place, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for weight in weights:
        if (
            not weight.is_contiguous()
            or weight.untyped_storage().data_ptr() != storage
            or weight.data_ptr() != place
        ):
            break
        place += weight.nbytes
    else:
        return first.detach().as_strided((n_rows, width), (width, 1), first.storage_offset())
    together = torch.cat([weight.detach() for weight in weights])
    for weight, part in zip(weights, together.split([weight.shape[0] for weight in weights]), strict=True):
        weight.data = part
    return together
