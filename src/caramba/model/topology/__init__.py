"""Topologies: how nodes are wired. A topology is a module called as topology(x, ctx=None)."""

from caramba.model.topology.base import Topology, applications, attention_applications
from caramba.model.topology.branching import BranchingTopology
from caramba.model.topology.build import build_node, build_nodes, own_config
from caramba.model.topology.checkpointing import Granularity, checkpoint_topology, clear_checkpointing
from caramba.model.topology.cyclic import CyclicTopology
from caramba.model.topology.nested import NestedTopology
from caramba.model.topology.parallel import ParallelTopology
from caramba.model.topology.recurrent import RecurrentTopology
from caramba.model.topology.regions import compilable_regions, join_repeats, sharding_units
from caramba.model.topology.residual import ResidualTopology
from caramba.model.topology.stacked import StackedTopology

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
