"""Schemas of the topologies: how nodes are wired. A topology's width rule stands beside its fields."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from caramba.config.layer import Positive
from caramba.config.node import Node, NodeConfig

Nodes = Annotated[tuple[Node, ...], Field(min_length=1)]


class TopologyConfig(NodeConfig):
    """A node that holds other nodes."""

    layers: Nodes


class StackedTopologyConfig(TopologyConfig):
    """Runs its list in order; the root of a model."""

    target = "caramba.topology.stacked:StackedTopology"

    type: Literal["StackedTopology"] = "StackedTopology"


class SequentialTopologyConfig(TopologyConfig):
    """Runs its list in order, inside another node (the same class as StackedTopology serves it)."""

    target = "caramba.topology.stacked:StackedTopology"

    type: Literal["SequentialTopology"] = "SequentialTopology"


class ResidualTopologyConfig(TopologyConfig):
    """x + f(x): f keeps the width."""

    target = "caramba.topology.residual:ResidualTopology"

    type: Literal["ResidualTopology"] = "ResidualTopology"


class NestedTopologyConfig(TopologyConfig):
    """Repeats its list `repeat` times in depth, each repeat with weights of its own."""

    target = "caramba.topology.nested:NestedTopology"

    type: Literal["NestedTopology"] = "NestedTopology"
    repeat: Positive


class ParallelTopologyConfig(TopologyConfig):
    """Feeds the same x to every node and stacks the outputs on a new dimension -2, which a LinearLayer reduces."""

    target = "caramba.topology.parallel:ParallelTopology"

    type: Literal["ParallelTopology"] = "ParallelTopology"


class BranchingTopologyConfig(TopologyConfig):
    """Feeds the same x to every node and concatenates the outputs on the features."""

    target = "caramba.topology.branching:BranchingTopology"

    type: Literal["BranchingTopology"] = "BranchingTopology"


class CyclicTopologyConfig(TopologyConfig):
    """Runs its list `n_cycles` times with shared weights; each cycle has caches of its own."""

    target = "caramba.topology.cyclic:CyclicTopology"

    type: Literal["CyclicTopology"] = "CyclicTopology"
    n_cycles: Positive


class RecurrentTopologyConfig(TopologyConfig):
    """Recurs over depth: one set of weights, `steps` times; each step's output is the next step's state.

    A step computes h <- f(h + x) with h starting at zero, so the input stays visible at every depth, and each step has
    caches of its own.
    """

    target = "caramba.topology.recurrent:RecurrentTopology"

    type: Literal["RecurrentTopology"] = "RecurrentTopology"
    steps: Positive
