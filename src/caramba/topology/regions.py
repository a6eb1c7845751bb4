"""Where a topology is cut for compilation."""

from __future__ import annotations

from torch import nn

from caramba.topology.checkpointing import repeats
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


def join_repeats(topology: nn.Module) -> None:
    """Have each repeat of a nested list run as one module, and be compiled as one, until `clear_checkpointing`.

    A residual sum and the norm after it are then one pass. Hooks on modules within a repeat would run inside its
    compiled code, so a topology with any is left as it is. Parts that are checkpointed stay what is compiled.
    """
    for module in topology.modules():
        if "forward" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks:
            return
    for module in topology.modules():
        if isinstance(module, NestedTopology) and module.runs is None:
            module.runs = tuple(repeats(module))
