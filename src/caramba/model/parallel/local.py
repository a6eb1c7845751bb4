"""Modules whose parameters are DTensors and whose forward reads this rank's shard as plain tensors."""

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

from caramba.model.parallel.collectives import copy_to_region


def split_parameters(
    module: nn.Module, mesh: DeviceMesh, dims: Mapping[str, int], shared: Collection[str] = ()
) -> None:
    """Replace a module's direct parameters by DTensors on `mesh`; its forward reads this rank's shard.

    Names do not change in `parameters()` and the state dict. Layers still compute with plain tensors, so kernels,
    compilation and caches work as on one device.

    Args:
        dims: split dimension of each parameter by name; other parameters are replicated.
        shared: replicated parameters that each rank uses for a part of the work: their gradients are summed.
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
    """The process group that shares a module's work, and its parameters whose gradients are summed."""

    group: dist.ProcessGroup
    summed: frozenset[str] = frozenset()

    def __deepcopy__(self, memo: dict[int, Any]) -> RankShare:
        return self  # a copied model belongs to the same ranks


def add_mixin(module: nn.Module, mixin: type, **attributes: Any) -> None:
    """Put a mixin before a module's class, and set plain attributes."""
    module.__dict__.update(attributes)
    module.__class__ = _mixed(mixin, type(module))


def rank_share(module: nn.Module) -> RankShare:
    """Return the RankShare that `split_parameters` stored on a module."""
    return module.__dict__["share"]


@functools.cache  # equal layers are of one class, so that compiled code serves all of them
def _mixed(mixin: type, base: type[nn.Module]) -> type[nn.Module]:
    return type(f"{mixin.__name__.lstrip('_')}{base.__name__}", (mixin, base), {})


@functools.cache
def _local_mixin(names: tuple[str, ...]) -> type:
    """Return a mixin with properties that read the local shards of these parameters."""
    return type("Local", (), {name: property(_local_reader(name)) for name in names})


def _local_reader(name: str) -> Callable[[nn.Module], Tensor | None]:
    def read(self: nn.Module) -> Tensor | None:
        value = self._parameters[name]
        # On a mesh of several dimensions it is FSDP's sharded state between forwards, not a layer's shard.
        if not isinstance(value, DTensor) or value.device_mesh.ndim > 1:
            return value
        local, share = value.to_local(), rank_share(self)
        return copy_to_region(local, share.group) if name in share.summed else local

    return read


def keep_local(module: nn.Module) -> None:
    """Replace every DTensor parameter by this rank's shard as a frozen plain parameter, for inference.

    Quantisation and captured steps then read the same tensors as the forward.
    """
    for one in module.modules():
        for name, parameter in list(one.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                one.register_parameter(name, nn.Parameter(parameter.to_local().detach(), requires_grad=False))


def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return unsharded weights and buffers with single-process names and shapes. Every rank must call it."""
    with torch.no_grad():
        return {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in module.state_dict().items()
        }
