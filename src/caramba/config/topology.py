"""Schemas of the topologies: how nodes are wired. A topology's width rule is next to its fields."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import Field

from caramba.config.attention import AttentionLayerConfig
from caramba.config.cost import MOST_RUNS, Cost, Unknown, Width, WidthError, container_cost
from caramba.config.extension import TYPE, Node, NodeConfig, is_own, user_traceback
from caramba.config.layer_base import LayerConfig
from caramba.config.memory_bank import MemoryBankLayerConfig
from caramba.config.source import is_mapping, list_of


class LayerError(Exception):
    """A method of a person's own layer failed, or contradicts another; `path` leads from the node that was asked."""

    def __init__(self, message: str, path: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.message, self.path = message, path

    def inside(self, step: str) -> LayerError:
        """Return this fault as the container sees it, whose child `step` is."""
        return LayerError(self.message, (step, *self.path))


def is_own_layer(node: Any) -> TypeGuard[LayerConfig]:
    """Whether a node is a layer of a person's own."""
    return isinstance(node, LayerConfig) and is_own(type(node))


def custom_layers(node: Any, path: str) -> Iterator[tuple[str, LayerConfig]]:
    """Yield (path, layer) of a topology's layers that are a person's own."""
    if is_own_layer(node):
        yield path, node
    for index, child in enumerate(list_of(getattr(node, "layers", None))):
        yield from custom_layers(child, f"{path}.layers[{index}]")


def infer_node(node: NodeConfig, width: Width) -> Cost:
    """Return what a node costs at a width; of a person's own layer also hold its methods against one another.

    Raises:
        WidthError: the node does not take this width.
        LayerError: a method of a person's own layer failed, or returned what contradicts another.
    """
    if not is_own_layer(node):
        return node.infer(width)
    name = type(node).__name__
    try:
        shapes, streams = node.parameter_shapes(), node.cached_streams()
        problem = _unreadable(node, shapes, streams)
        if problem is not None:  # which infer would fail on
            raise LayerError(f"{name}: {problem}")
        cost = node.infer(width)
        problem = _contradiction(node, cost, shapes, streams)
    except (WidthError, LayerError):
        raise
    except Exception as error:
        raise LayerError(f"{name}: what the layer declares cannot be read: {user_traceback(error)}") from error
    if problem is not None:
        raise LayerError(f"{name}: {problem}")
    unknown: set[tuple[Unknown, str]] = {("cache", node.type)} if node.decoding == "refused" else set()
    return dataclasses.replace(cost, unknown=cost.unknown | unknown)


def _unreadable(node: LayerConfig, shapes: Any, streams: Any) -> str | None:
    """Return which declaration is not of the form that it is read in, None where all are."""
    if not _are_shapes(shapes):
        return (
            f"parameter_shapes() returned {shapes!r}, expected names and sizes such as "
            '{"weight": (64, 64)}, {} for a layer without weights'
        )
    if node.decoding == "cached" and not _are_streams(streams):
        return (
            f'decoding = "cached" and cached_streams() returned {streams!r}, expected (name, heads, width) of one '
            'tensor or more, such as (("x", 1, 64),)'
        )
    return None


def _contradiction(node: LayerConfig, cost: Any, shapes: Any, streams: Any) -> str | None:
    """Return how what a layer's methods say does not go together, None where it does."""
    if not isinstance(cost, Cost):
        return f"infer(width) returned {cost!r}, expected a Cost; return layer_cost(...) of caramba.config"
    params = sum(math.prod(shape) for shape in shapes.values())
    if cost.params != params:
        return (
            f"infer(width) counts {cost.params:,} parameters and parameter_shapes() declares {params:,}; give infer "
            "the shapes of parameter_shapes()"
        )
    wanted: tuple[Any, ...] = (tuple(streams),) if node.decoding == "cached" else ()
    if any(cost.kv) and cost.kv != wanted:
        return (
            f"infer(width) counts the cached streams {cost.kv} and decoding = {node.decoding!r} keeps {wanted}; give "
            "infer the streams of cached_streams()"
        )
    if wanted and not any(cost.kv):
        return "infer(width) counts no cached streams; give layer_cost streams=self.cached_streams()"
    return None


def _are_shapes(shapes: Any) -> bool:
    return is_mapping(shapes) and all(
        isinstance(name, str) and isinstance(shape, tuple) and _are_sizes(list_of(shape), least=0)
        for name, shape in shapes.items()
    )


def _are_streams(streams: Any) -> bool:
    listed = list_of(streams)
    return bool(listed) and all(
        len(list_of(stream)) == 3 and isinstance(stream[0], str) and _are_sizes(list_of(stream)[1:], least=1)
        for stream in listed
    )


def _are_sizes(sizes: list[Any], least: int) -> bool:
    return all(type(size) is int and size >= least for size in sizes)


Repeats = Annotated[int, Field(gt=0, le=MOST_RUNS)]
Nodes = Annotated[tuple[Node, ...], Field(min_length=1)]


class TopologyConfig(NodeConfig):
    """A node that holds other nodes. By default they run in order, once."""

    layers: Nodes = Field(description="the nodes of this topology, in order")

    def infer(self, width: Width) -> Cost:
        """Check the widths from node to node and return the cost of the tree.

        Raises:
            WidthError: a node inside does not take the width that reaches it; its path starts at this node.
        """
        return self._in_order(width)

    def _in_order(self, width: Width, repeat: int = 1, shared: bool = False, keeps: str | None = None) -> Cost:
        """Chain the nodes; with `keeps` (the reason) the last width has to equal the first."""
        costs: list[Cost] = []
        current = width
        for index in range(len(self.layers)):
            cost = self._child(index, current, f"layers[{index - 1}]" if index else None)
            costs.append(cost)
            current = cost.width_out
        if keeps is not None and current != width:
            last = f"layers[{len(self.layers) - 1}]"
            raise WidthError(
                f"keeps its width ({keeps}): expects {width.label} out",
                current.label,
                f"end it with width {width.label}",
                source=last,
            )
        return container_cost(self.type, width, current, tuple(costs), repeat, shared)

    def _side_by_side(self, width: Width) -> tuple[Cost, ...]:
        """Give every node the same width; none may hand on a stack."""
        costs = tuple(self._child(index, width, None) for index in range(len(self.layers)))
        for index, cost in enumerate(costs):
            if cost.width_out.stack is not None:
                fix = "end the branch with a LinearLayer with reduce: mean, sum or concat"
                raise WidthError(
                    "expects one stream from each branch",
                    cost.width_out.label,
                    fix,
                    source=f"layers[{index}]",
                )
        return costs

    def _child(self, index: int, width: Width, previous: str | None) -> Cost:
        try:
            return infer_node(self.layers[index], width)
        except WidthError as error:
            raise error.inside(f"layers[{index}]", previous) from None
        except LayerError as fault:
            raise fault.inside(f"layers[{index}]") from fault.__cause__


class StackedTopologyConfig(TopologyConfig):
    """Runs its list in order; the root of a model."""

    target = "caramba.model.topology.base:StackedTopology"

    type: Literal["StackedTopology"] = Field(default="StackedTopology", description=TYPE)


class SequentialTopologyConfig(TopologyConfig):
    """Runs its list in order, inside another node (the same class as StackedTopology serves it)."""

    target = "caramba.model.topology.base:StackedTopology"

    type: Literal["SequentialTopology"] = Field(default="SequentialTopology", description=TYPE)


class ResidualTopologyConfig(TopologyConfig):
    """x + f(x): f keeps the width."""

    target = "caramba.model.topology.base:ResidualTopology"

    type: Literal["ResidualTopology"] = Field(default="ResidualTopology", description=TYPE)

    def infer(self, width: Width) -> Cost:
        """Chain the nodes, which give back the width that they took."""
        return self._in_order(width, keeps="its output is added to its input")


class NestedTopologyConfig(TopologyConfig):
    """Repeats its list `repeat` times in depth, each repeat with weights of its own."""

    target = "caramba.model.topology.base:NestedTopology"

    type: Literal["NestedTopology"] = Field(default="NestedTopology", description=TYPE)
    repeat: Repeats = Field(description="number of repeats of the list, each with its own weights")

    def infer(self, width: Width) -> Cost:
        """Chain the nodes once, count them `repeat` times; repeated, they give back the width they took."""
        return self._in_order(width, self.repeat, keeps="each repeat feeds the next" if self.repeat > 1 else None)


class ParallelTopologyConfig(TopologyConfig):
    """Feeds the same x to every node and stacks the outputs on a new dimension -2, for a LinearLayer."""

    target = "caramba.model.topology.base:ParallelTopology"

    type: Literal["ParallelTopology"] = Field(default="ParallelTopology", description=TYPE)

    def infer(self, width: Width) -> Cost:
        """Return a stack of as many streams as there are nodes, which all give the same width."""
        costs = self._side_by_side(width)
        first = costs[0].width_out
        for index, cost in enumerate(costs):
            if cost.width_out != first:
                message = f"stacks its branches: expects width {first.d_model}, as layers[0] gives"
                fix = f"end the branch with width {first.d_model}, or use a BranchingTopology"
                raise WidthError(message, cost.width_out.label, fix, source=f"layers[{index}]")
        return container_cost(self.type, width, Width(first.d_model, len(costs)), costs)


class BranchingTopologyConfig(TopologyConfig):
    """Feeds the same x to every node and concatenates the outputs on the features."""

    target = "caramba.model.topology.base:BranchingTopology"

    type: Literal["BranchingTopology"] = Field(default="BranchingTopology", description=TYPE)

    def infer(self, width: Width) -> Cost:
        """Return one stream as wide as all nodes' outputs together."""
        costs = self._side_by_side(width)
        return container_cost(self.type, width, Width(sum(cost.width_out.d_model for cost in costs)), costs)


class CyclicTopologyConfig(TopologyConfig):
    """Runs its list `n_cycles` times with shared weights; each cycle has caches of its own."""

    target = "caramba.model.topology.base:CyclicTopology"

    type: Literal["CyclicTopology"] = Field(default="CyclicTopology", description=TYPE)
    n_cycles: Repeats = Field(description="number of passes through the list, with shared weights")

    def infer(self, width: Width) -> Cost:
        """Count weights once, work and caches once per cycle; each feeds the next, so the width is kept."""
        return self._in_order(width, self.n_cycles, shared=True, keeps="each cycle feeds the next")


class RecurrentTopologyConfig(TopologyConfig):
    """Recurs over depth: one set of weights, `steps` times; each step's output is the next step's state.

    A step computes h <- f(h + x) with h starting at zero, so the input stays visible at every depth, and each
    step has caches of its own.
    """

    target = "caramba.model.topology.base:RecurrentTopology"

    type: Literal["RecurrentTopology"] = Field(default="RecurrentTopology", description=TYPE)
    steps: Repeats = Field(description="number of steps in depth, with shared weights")

    def infer(self, width: Width) -> Cost:
        """Count weights once, work and caches once per step; the output is the next state: same width."""
        return self._in_order(width, self.steps, shared=True, keeps="its output is added to its input at the next step")


def attention_configs(node: Any) -> list[AttentionLayerConfig]:
    """Return the attention layers of a topology with weights of their own, in the order in which they first run."""
    if isinstance(node, AttentionLayerConfig):
        return [node]
    if not isinstance(node, TopologyConfig):
        return []
    found = [config for child in node.layers for config in attention_configs(child)]
    return found * node.repeat if isinstance(node, NestedTopologyConfig) else found


def memory_window(topology: TopologyConfig) -> int | None:
    """Return the longest window in front of memory slots, None of a topology without them."""
    layers = (layer for layer in attention_configs(topology) if isinstance(layer, MemoryBankLayerConfig))
    return max((layer.local_window or 0 for layer in layers), default=None)
