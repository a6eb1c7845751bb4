"""Regions of a topology for compilation, and units for weight sharding."""

from __future__ import annotations

from torch import nn

from caramba.model.topology.base import NestedTopology, StackedTopology


def compilable_regions(module: nn.Module) -> list[nn.Module]:
    """Return the nodes that plain lists hold, at whatever depth: what is compiled piece by piece.

    Equal blocks then share one compiled graph, so that compilation takes as long at 32 layers as at one. Nodes that
    do more than run a list (residual, parallel, cyclic, ...) stay whole, as do repeats that are checkpointed as one.
    """
    if isinstance(module, NestedTopology) and module.runs is not None:
        return list(module.runs)
    if not isinstance(module, StackedTopology | NestedTopology):
        return [module]
    return [region for layer in module.layers for region in compilable_regions(layer)]


def sharding_units(module: nn.Module, types: tuple[str, ...] | None = None) -> list[list[nn.Module]]:
    """Return the FSDP units: consecutive nodes whose weights are gathered together.

    A unit is one repeat of a NestedTopology's list, or a node that a plain list holds, at whatever depth; lists whose
    weights run several times (cyclic, recurrent) stay whole, so that they are gathered once. Nodes without children,
    such as a last norm, are too small to gather alone. With `types` every outermost node of these classes is a unit.
    """
    if types is not None:
        # Tensor parallelism derives a new class from a layer's.
        if any(kind.__name__ in types for kind in type(module).__mro__):
            return [[module]]
        return [unit for child in module.children() for unit in sharding_units(child, types)]
    if isinstance(module, NestedTopology):
        n = len(module.config.layers)
        repeats = [list(module.layers[at : at + n]) for at in range(0, len(module.layers), n)]
        return [repeat for repeat in repeats if any(True for node in repeat for _ in node.parameters())]
    if isinstance(module, StackedTopology):
        return [unit for layer in module.layers for unit in sharding_units(layer)]
    has_weights = any(True for _ in module.parameters())
    return [[module]] if has_weights and any(True for _ in module.children()) else []
