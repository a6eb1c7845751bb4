"""Layers of a person's own, as plans and checks see them: nothing is taken on trust that can be compared."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, TypeGuard

from caramba.config.cost import Cost, Unknown, Width, WidthError
from caramba.config.layer_base import LayerConfig
from caramba.config.narrowing import is_mapping, list_of
from caramba.config.node import NodeConfig, is_own
from caramba.config.user_traceback import user_traceback


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
        raise LayerError(
            f"{name}: what the layer declares cannot be read: {user_traceback(error)}"
        ) from error
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
