"""Topologies: how nodes are wired. A topology is a module called as topology(x, ctx=None)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from caramba.exports import lazy_exports

if TYPE_CHECKING:
    from caramba.model.topology.base import (
        BranchingTopology,
        CyclicTopology,
        NestedTopology,
        ParallelTopology,
        RecurrentTopology,
        ResidualTopology,
        StackedTopology,
        Topology,
        applications,
        attention_applications,
        build_node,
        build_nodes,
        own_config,
    )
    from caramba.model.topology.checkpointing import Granularity, checkpoint_topology, clear_checkpointing
    from caramba.model.topology.regions import compilable_regions, sharding_units

__all__ = [
    "BranchingTopology",
    "CyclicTopology",
    "Granularity",
    "NestedTopology",
    "ParallelTopology",
    "RecurrentTopology",
    "ResidualTopology",
    "StackedTopology",
    "Topology",
    "applications",
    "attention_applications",
    "build_node",
    "build_nodes",
    "checkpoint_topology",
    "clear_checkpointing",
    "compilable_regions",
    "own_config",
    "sharding_units",
]

__getattr__ = lazy_exports(__name__, __file__)
