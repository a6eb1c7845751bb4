"""Topologies: how nodes are wired. A topology is a module called as topology(x, ctx=None)."""

from typing import TYPE_CHECKING

from caramba.exports import lazy_exports

if TYPE_CHECKING:
    from caramba.model.topology.base import NestedTopology as NestedTopology
    from caramba.model.topology.base import ResidualTopology as ResidualTopology
    from caramba.model.topology.base import StackedTopology as StackedTopology
    from caramba.model.topology.base import Topology as Topology
    from caramba.model.topology.base import attention_applications as attention_applications
    from caramba.model.topology.base import build_node as build_node
    from caramba.model.topology.checkpointing import Granularity as Granularity
    from caramba.model.topology.checkpointing import checkpoint_topology as checkpoint_topology
    from caramba.model.topology.checkpointing import clear_checkpointing as clear_checkpointing
    from caramba.model.topology.checkpointing import compilable_regions as compilable_regions
    from caramba.model.topology.checkpointing import sharding_units as sharding_units

__getattr__ = lazy_exports(__name__, __file__)
