"""Modules whose parameters are DTensors and whose forward sees this rank's part of them, as plain tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from caramba.parallel.collectives import copy_to_region


def split_parameters(
    module: nn.Module, mesh: DeviceMesh, dims: Mapping[str, int], shared: Collection[str] = ()
) -> None:
    """Make a module's own parameters DTensors on `mesh`, and let its forward read this rank's part of them.

    Names stay as they are, in `parameters()` and in the state dict. Layers go on with plain tensors, so the kernels,
    compilation and caches that serve one device serve a rank.

    Args:
        dims: the dimension on which a parameter is split, by its name; those not named are the same on all ranks.
        shared: which of these all ranks use for a part of the work each: their gradients are summed.
    """
    rank, n_ranks = mesh.get_local_rank(), mesh.size()
    for name, parameter in list(module.named_parameters(recurse=False)):
        dim = dims.get(name)
        own = parameter.detach() if dim is None else parameter.detach().chunk(n_ranks, dim)[rank].clone()
        placement = Replicate() if dim is None else Shard(dim)
        whole = DTensor.from_local(own, mesh, [placement], run_check=False)
        module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
    names = tuple(sorted(module._parameters))
    add_mixin(module, _local_mixin(names), share=RankShare(mesh.get_group(), frozenset(shared)))


@dataclass(frozen=True)
class RankShare:
    """The ranks that share a module's work, and the parameters that all of them use for a part of it each."""

    group: dist.ProcessGroup
    summed: frozenset[str] = frozenset()

    def __deepcopy__(self, memo: dict[int, Any]) -> RankShare:
        return self  # a copied model is shared by the same ranks


def add_mixin(module: nn.Module, mixin: type, **attributes: Any) -> None:
    """Give a module the methods of a mixin, before those of its class, and attributes that are no parts of it."""
    module.__dict__.update(attributes)
    module.__class__ = _mixed(mixin, type(module))


def rank_share(module: nn.Module) -> RankShare:
    """Return what `split_parameters` noted of a module."""
    return module.__dict__["share"]


@functools.cache  # equal layers are of one class, so that compiled code serves all of them
def _mixed(mixin: type, base: type[nn.Module]) -> type[nn.Module]:
    return type(f"{mixin.__name__.lstrip('_')}{base.__name__}", (mixin, base), {})


@functools.cache
def _local_mixin(names: tuple[str, ...]) -> type:
    """Return a mixin whose attributes of these names are local tensors."""
    return type("Local", (), {name: property(_local_reader(name)) for name in names})


def _local_reader(name: str) -> Callable[[nn.Module], Tensor | None]:
    def read(self: nn.Module) -> Tensor | None:
        value = self._parameters[name]
        # Of more than one dimension is what FSDP holds between forwards: no rank's part of a layer.
        if not isinstance(value, DTensor) or value.device_mesh.ndim > 1:
            return value
        local, share = value.to_local(), rank_share(self)
        return copy_to_region(local, share.group) if name in share.summed else local

    return read


def keep_local(module: nn.Module) -> None:
    """Keep this rank's part of every weight as a plain parameter without a gradient: to serve, not to train.

    What reads parameters then, quantisation and captured steps among it, finds the tensors that the forward reads.
    """
    for one in module.modules():
        for name, parameter in list(one.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                one.register_parameter(name, nn.Parameter(parameter.to_local().detach(), requires_grad=False))


def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return whole weights and buffers, by the names and shapes of one process. Every rank calls it, and gets them."""
    with torch.no_grad():
        return {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in module.state_dict().items()
        }
