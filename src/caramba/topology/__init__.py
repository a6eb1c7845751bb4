"""Topologies: how nodes are wired. A topology is a module called as topology(x, ctx=None)."""

from caramba.topology.base import Topology, applications, attention_applications
from caramba.topology.branching import BranchingTopology
from caramba.topology.build import build_node, build_nodes, own_config
from caramba.topology.checkpointing import Granularity, checkpoint_topology, clear_checkpointing
from caramba.topology.cyclic import CyclicTopology
from caramba.topology.nested import NestedTopology
from caramba.topology.parallel import ParallelTopology
from caramba.topology.recurrent import RecurrentTopology
from caramba.topology.regions import compilable_regions, join_repeats, sharding_units
from caramba.topology.residual import ResidualTopology
from caramba.topology.stacked import StackedTopology

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
    "join_repeats",
    "own_config",
    "sharding_units",
]
