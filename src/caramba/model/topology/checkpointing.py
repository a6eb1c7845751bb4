"""Gradient checkpointing (activation checkpointing): which parts of a forward are computed again in backward."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from caramba.model.topology.base import (
    CyclicTopology,
    NestedTopology,
    RecurrentTopology,
    StackedTopology,
    Topology,
)

Granularity = Literal["layer", "block"]
LISTS = (StackedTopology, NestedTopology, CyclicTopology, RecurrentTopology)
KEPT = ("mm", "addmm", "_scaled_mm")
"""Products of a matrix and weights under `aten`; those of attention (bmm) are as large as its scores."""
ATTENTION = (
    *("scaled_dot_product", "flash_attention", "efficient_attention", "varlen_attn", "flex_attention"),
    "decoupled_attention",
    "prefix_attention",
    "first_tokens",
)


class NodeRun(nn.Module):
    """Neighbours of a list, run in order as one. They stay in the list, under their names there."""

    def __init__(self, nodes: Iterable[nn.Module]) -> None:
        super().__init__()
        self.nodes = tuple(nodes)  # a tuple registers nothing

    def forward(self, x: Tensor, ctx: Any = None) -> Tensor:
        for node in self.nodes:
            x = node(x, ctx)
        return x


def repeats(nested: NestedTopology) -> Iterator[NodeRun]:
    """Yield each repeat of a list as one module."""
    n = len(nested.config.layers)
    for at in range(0, len(nested.layers), n):
        yield NodeRun(nested.layers[at : at + n])


def checkpoint_topology(topology: nn.Module, mode: str, granularity: Granularity = "block") -> list[nn.Module]:
    """Run the parts of a topology under activation checkpointing from now on, wherever gradients are on.

    `full` keeps a part's input alone and computes the part again in backward; `selective` also keeps the outputs of
    matrix products and attention, and computes the rest again. Gradients are the same to the bit: random state is put
    back for the second forward.

    Args:
        mode: none, selective or full. Whatever was applied before is undone first.
        granularity: a part is one repeat of a NestedTopology's list (block), or each node of a list (layer).

    Returns:
        the parts: what to compile, one by one, so that compiled code contains its own recomputation.

    Reference: Chen et al., 2016, arXiv:1604.06174; Korthikanti et al., 2022, arXiv:2205.05198, for selective.
    """
    clear_checkpointing(topology)
    if mode == "none":
        return []
    parts = list(_parts(topology, granularity))
    for part in parts:
        part.forward = _Checkpointed(part.forward, mode == "selective")
    return parts


def clear_checkpointing(topology: nn.Module) -> None:
    """Undo `checkpoint_topology`."""
    for module in topology.modules():
        if isinstance(module, NestedTopology):
            module.runs = None
        if isinstance(module.__dict__.get("forward"), _Checkpointed):
            del module.__dict__["forward"]


class _Checkpointed:
    """A forward that is computed again in backward, where gradients are on."""

    def __init__(self, forward: Callable[..., Tensor], is_selective: bool) -> None:
        self.forward = forward
        self.is_selective = is_selective

    def __call__(self, x: Tensor, ctx: Any = None) -> Tensor:
        if not torch.is_grad_enabled():
            return self.forward(x, ctx)
        if self.is_selective:
            return checkpoint(self.forward, x, ctx, use_reentrant=False, context_fn=_keep_products)
        return checkpoint(self.forward, x, ctx, use_reentrant=False)


_keep_products = functools.partial(create_selective_checkpoint_contexts, lambda ctx, op, *args, **kwargs: _policy(op))


def _policy(op: Any) -> CheckpointPolicy:
    namespace, _, name = op.name().partition("::")
    stem = name.partition(".")[0]
    is_kept = (namespace == "aten" and stem in KEPT) or (
        any(word in stem for word in ATTENTION) and "backward" not in stem
    )
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _parts(module: nn.Module, granularity: Granularity) -> Iterator[nn.Module]:
    """Yield what lists hold, at whatever depth; a leaf, such as a norm, has nothing that is worth a second forward."""
    if isinstance(module, NestedTopology) and granularity == "block":
        module.runs = tuple(repeats(module))
        yield from module.runs
    elif isinstance(module, LISTS):
        for layer in module.layers:
            yield from _parts(layer, granularity)
    elif isinstance(module, Topology) or any(True for _ in module.children()):
        yield module


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
