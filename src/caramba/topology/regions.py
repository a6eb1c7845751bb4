"""Where a topology is cut for compilation."""

from __future__ import annotations

from torch import nn

from caramba.topology.nested import NestedTopology
from caramba.topology.stacked import StackedTopology


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
