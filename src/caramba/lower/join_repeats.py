"""Repeats of a nested list as one compiled module each, so that a residual sum and the norm after it are one pass."""

from torch import nn

from caramba.lower.lowering import has_hooks
from caramba.model.topology import NestedTopology
from caramba.model.topology.checkpointing import repeats


def join_repeats(topology: nn.Module) -> None:
    """Run and compile each repeat of a nested list as one module, until `clear_checkpointing`.

    Hooks on modules within a repeat would run inside its compiled code, so a topology with any is left as it is. Parts
    that are checkpointed stay what is compiled.
    """
    if any(has_hooks(module) for module in topology.modules()):
        return
    for module in topology.modules():
        if isinstance(module, NestedTopology) and module.runs is None:
            module.runs = tuple(repeats(module))
