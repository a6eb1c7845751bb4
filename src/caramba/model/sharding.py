"""Models whose weights are spread over ranks (FSDP2), filled from a whole model and gathered into one."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from caramba.config.parallel import ParallelConfig
from caramba.errors import ConfigError
from caramba.model.custom_layers import refuse_lost_tensors
from caramba.model.model import Model
from caramba.model.topology import sharding_units
from caramba.runtime import get_local_world_size, get_world_size

REPLICATE, SHARD, SPLIT = "replicate", "shard", "split"


@dataclass(frozen=True)
class Sharding:
    """How the weights of a model are spread: over which ranks, by which units, gathered in which dtype.

    `within` is the mesh of ranks that split every layer first (tensor parallel). With `dtype` blocks are gathered in
    it, and what is outside of them (embedding, head, last norm) as it is, so that the residual stream stays as wide as
    without sharding. Gradients of blocks are summed over ranks in `reduce_dtype`, of what is outside in float32.
    """

    mesh: DeviceMesh
    within: DeviceMesh | None = None
    reshards: bool = True
    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype = torch.float32
    units: tuple[str, ...] | None = None


def sharding_of(parallel: ParallelConfig, device: torch.device, computes_in: str) -> Sharding:
    """Return how a phase that computes in `computes_in` shards its weights over the ranks there are.

    Over several nodes weights are sharded within each node and replicated between them (HSDP), unless `sharding` sets
    otherwise.

    Raises:
        ConfigError: HYBRID_SHARD on one node, or nodes of different sizes.
    """
    world, here = get_world_size(), get_local_world_size()
    if world % here:
        raise ConfigError(f"parallel: {world} ranks in nodes of {here}; start as many on every node")
    nodes = world // here
    if parallel.sharding == "HYBRID_SHARD" and nodes == 1:
        raise ConfigError(
            "parallel.sharding=HYBRID_SHARD shards within a node and replicates between nodes, and all ranks are on "
            "one; use FULL_SHARD, or leave sharding out"
        )
    if here % parallel.tp:
        raise ConfigError(
            f"parallel: tp={parallel.tp} does not divide the {here} ranks of a node, and a layer is split within one; "
            "use a divisor of them"
        )
    is_hybrid = nodes > 1 and parallel.tp == 1 and parallel.sharding in (None, "HYBRID_SHARD")
    shape, names = ((nodes, here), (REPLICATE, SHARD)) if is_hybrid else ((world // parallel.tp,), (SHARD,))
    within = None
    if parallel.tp > 1:
        grid = init_device_mesh(device.type, (*shape, parallel.tp), mesh_dim_names=(*names, SPLIT))
        mesh, within = grid[SHARD], grid[SPLIT]
    else:
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    is_narrow = parallel.mixed_precision == "bfloat16" or (
        parallel.mixed_precision == "auto" and computes_in == "bfloat16"
    )
    return Sharding(
        mesh,
        within,
        reshards=parallel.sharding != "SHARD_GRAD_OP",
        dtype=torch.bfloat16 if is_narrow else None,
        reduce_dtype=getattr(torch, parallel.reduce_dtype),
        units=parallel.wrap,
    )


def shard_model(model: Model, sharding: Sharding) -> None:
    """Spread the weights of a model over the ranks of a mesh, block by block; it may be on meta.

    Raises:
        ConfigError: the topology has no node of the types that are named, or a custom layer has numbers
            that no state dict holds.
    """
    refuse_lost_tensors(model)
    units = sharding_units(model.topology, sharding.units)
    if sharding.units is not None and not units:
        own = "caramba.model.parallel"  # classes of shared layers, each made from a layer's own
        kinds = (type(module).__mro__ for module in model.topology.modules())
        found = sorted({next(k.__name__ for k in mro if not k.__module__.startswith(own)) for mro in kinds})
        raise ConfigError(
            f"parallel.wrap={list(sharding.units)}: the topology has no such node; it has {', '.join(found)}"
        )
    policy = MixedPrecisionPolicy(
        param_dtype=sharding.dtype, reduce_dtype=sharding.reduce_dtype, cast_forward_inputs=False
    )
    for unit in units:
        fully_shard(
            unit[0] if len(unit) == 1 else unit,
            mesh=sharding.mesh,
            reshard_after_forward=sharding.reshards,
            mp_policy=policy,
        )
    # The loss reads the head's weights after the forward: they stay gathered until backward.
    fully_shard(model, mesh=sharding.mesh, reshard_after_forward=False)
    register_fsdp_forward_method(model, "hidden")


def fill_sharded(model: Model, whole: Model | None, device: torch.device) -> None:
    """Allocate a sharded model on meta and copy the weights of rank 0's `whole` model; other ranks need none."""
    model.to_empty(device=device)
    state = {} if whole is None else {name: value.detach() for name, value in whole.state_dict().items()}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))


def gather_state(model: nn.Module) -> dict[str, Tensor]:
    """Gather the weights of a sharded model on the host of rank 0; other ranks take part and get none."""
    reshard(model)
    state: dict[str, Any] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    return state


def reshard(model: nn.Module) -> None:
    """Let go of weights that a forward without backward left gathered."""
    for module in model.modules():
        if callable(release := getattr(module, "reshard", None)):
            release()
