"""Topologies: lists of nodes, and how a forward runs through them."""

import importlib
import inspect
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from caramba.cache import Context, DeviceContext
from caramba.config.extension import NodeConfig, is_own, types_kept, user_traceback
from caramba.config.layer_base import LayerConfig
from caramba.config.topology import (
    CyclicTopologyConfig,
    NestedTopologyConfig,
    RecurrentTopologyConfig,
    TopologyConfig,
    is_own_layer,
)
from caramba.errors import ConfigError
from caramba.layer.attention import AttentionLayer
from caramba.layer.documents import Documents

OWN = "own_config"  # the attribute by which a module of a person's own layer is known, whatever else is done to it


def _imported(config: NodeConfig, name: str) -> ModuleType:
    if not is_own(type(config)):
        return importlib.import_module(name)
    with types_kept():
        return importlib.import_module(name)


def build_node(config: NodeConfig) -> nn.Module:
    """Build a layer or a topology; the class is looked up by the config's `target`, "module:Class".

    Raises:
        ConfigError: the target cannot be imported, or is no torch module; or a layer of a person's own whose
            constructor fails, whose forward takes no context, or whose parameters are not those that it declares.
    """
    module_name, _, class_name = config.target.partition(":")
    try:
        cls = getattr(_imported(config, module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        why = user_traceback(error) if is_own(type(config)) and not isinstance(error, AttributeError) else error
        raise ConfigError(
            f"{config.type}: cannot find target {config.target!r} ({why}); expected 'package.module:Class'"
        ) from error
    except Exception as error:
        if not is_own(type(config)):
            raise
        raise ConfigError(f"{config.type}: cannot import target {config.target!r}: {user_traceback(error)}") from error
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ConfigError(f"{config.type}: target {config.target!r} is not a torch.nn.Module class; name one")
    if is_own_layer(config):
        return _build_own(config, cls)
    return cls(config)


def build_nodes(configs: Sequence[NodeConfig]) -> nn.ModuleList:
    """Build each config's module, in order."""
    return nn.ModuleList(build_node(config) for config in configs)


def own_config(module: nn.Module) -> LayerConfig | None:
    """Return the config of a layer of a person's own, None of any other module."""
    return module.__dict__.get(OWN)


def _build_own(config: LayerConfig, cls: type[nn.Module]) -> nn.Module:
    where = f"{config.type} ({config.target})"
    make: Any = cls
    try:
        module = make(config)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{where}: {cls.__name__}(config) failed: {user_traceback(error)}; "
            "the constructor takes the schema object alone"
        ) from error
    try:
        inspect.signature(module.forward).bind(None, None)
    except TypeError:
        raise ConfigError(
            f"{where}: its forward does not take (x, ctx); define forward(self, x, ctx=None), in which ctx is None or "
            "holds what a cached decode has stored"
        ) from None
    check_parameters(module, config)
    module.__dict__[OWN] = config
    return module


def check_parameters(module: nn.Module, config: LayerConfig) -> None:
    """Check that a module has exactly the parameters that its schema declares, by name and shape.

    Raises:
        ConfigError: naming each that differs, as declared and as it is.
    """
    found = {name: _shape(parameter) for name, parameter in module.named_parameters()}
    declared = {name: tuple(shape) for name, shape in config.parameter_shapes().items()}
    if found == declared:
        return
    lines = [
        f"{name}: declared {declared.get(name, 'not at all')}, the module has {found.get(name, 'none')}"
        for name in {**declared, **found}
        if declared.get(name) != found.get(name)
    ]
    raise ConfigError(
        f"{config.type}: parameter_shapes() of {type(config).__name__} and {config.target} do not agree: "
        f"{'; '.join(lines)}; make them equal, for every count of parameters, memory and work is made from the former"
    )


def _shape(parameter: nn.Parameter) -> tuple[int, ...] | str:
    # Made at the first forward, when the optimiser and the checkpoint are made already.
    if is_lazy(parameter):
        return "a lazy parameter without a shape"
    return tuple(parameter.shape)


class Topology(nn.Module):
    """A module that runs other modules. `passes` is how many times one forward runs through `layers`.

    Every node is called as node(x, ctx) in a fixed order, the same in each forward: caches are handed out by
    it.
    """

    passes: int = 1

    def __init__(self, config: TopologyConfig) -> None:
        super().__init__()
        self.layers = build_nodes(config.layers)

    def run(self, x: Tensor, ctx: Context | DeviceContext | Documents | None) -> Tensor:
        """Run the list once, each node on the output of the one before."""
        for layer in self.layers:
            x = layer(x, ctx)
        return x


def applications(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (qualified name, layer) for every attention or custom-layer application, in execution order.

    Shared weights that run several times appear as many times. Layers inside a custom layer are not listed.
    """
    if isinstance(module, AttentionLayer) or own_config(module) is not None:
        yield name, module
        return
    for _ in range(module.passes if isinstance(module, Topology) else 1):
        for child_name, child in module.named_children():
            yield from applications(child, f"{name}.{child_name}" if name else child_name)


def custom_layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (qualified name, layer) of each distinct custom layer, in execution order."""
    return [(name, layer) for name, layer in dict(applications(model)).items() if own_config(layer) is not None]


def attention_applications(module: nn.Module, name: str = "") -> Iterator[tuple[str, AttentionLayer]]:
    """Yield (qualified name, layer) for every attention application of one forward, in execution order.

    Shared weights that run several times appear as many times.
    """
    for found, layer in applications(module, name):
        if isinstance(layer, AttentionLayer):
            yield found, layer


class StackedTopology(Topology):
    """Run the list in order: y = f_n(... f_1(x)). Serves SequentialTopology too.

    Shape: whatever the nodes make of [B, T, M].
    """

    def forward(self, x: Tensor, ctx: Context | Documents | None = None) -> Tensor:
        return self.run(x, ctx)


class ResidualTopology(Topology):
    """y = x + f(x), f being the list run in order.

    Shape: [..., M] to [..., M].

    Reference: He et al., 2015, arXiv:1512.03385.
    """

    def forward(self, x: Tensor, ctx: Context | DeviceContext | Documents | None = None) -> Tensor:
        return x + self.run(x, ctx)


class NestedTopology(Topology):
    """Run the list `repeat` times in order, each repeat with weights of its own.

    `layers` holds all repeats in a row: node i of repeat r is layers[r * n + i] of a list of n nodes.

    Shape: whatever the nodes make of [B, T, M].
    """

    def __init__(self, config: NestedTopologyConfig) -> None:
        super().__init__(config)
        self.config = config
        self.runs: tuple[nn.Module, ...] | None = None  # the repeats, where each runs as one: see checkpointing.py
        for _ in range(config.repeat - 1):
            self.layers.extend(build_nodes(config.layers))

    def forward(self, x: Tensor, ctx: Context | Documents | None = None) -> Tensor:
        if self.runs is None:
            return self.run(x, ctx)
        for repeat in self.runs:
            x = repeat(x, ctx)
        return x


class CyclicTopology(Topology):
    """Run the list `n_cycles` times with the same weights; each cycle's attention has a cache of its own.

    Shape: [B, T, M] to [B, T, M].

    Reference: Dehghani et al., 2018, arXiv:1807.03819, without its adaptive halting.
    """

    def __init__(self, config: CyclicTopologyConfig) -> None:
        super().__init__(config)
        self.passes = config.n_cycles

    def forward(self, x: Tensor, ctx: Context | Documents | None = None) -> Tensor:
        for _ in range(self.passes):
            x = self.run(x, ctx)
        return x


class ParallelTopology(Topology):
    """Feed the same x to each of N nodes and stack the outputs on a new dimension -2.

    Shape: [B, T, M] to [B, T, N, M']; a LinearLayer with `reduce` consumes the stack.
    """

    def forward(self, x: Tensor, ctx: Context | Documents | None = None) -> Tensor:
        return torch.stack([layer(x, ctx) for layer in self.layers], dim=-2)


class BranchingTopology(Topology):
    """Feed the same x to each node and concatenate the outputs on the features.

    Shape: [..., M] to [..., M_1 + ... + M_N].
    """

    def forward(self, x: Tensor, ctx: Context | Documents | None = None) -> Tensor:
        return torch.cat([layer(x, ctx) for layer in self.layers], dim=-1)


class RecurrentTopology(Topology):
    """Return h after `steps` updates h <- f(h + x) from h = 0.

    f runs the list in order. The input stays visible at every depth. Each step's attention has a separate cache.

    Shape: [B, T, M] to [B, T, M].
    """

    def __init__(self, config: RecurrentTopologyConfig) -> None:
        super().__init__(config)
        self.passes = config.steps

    def forward(self, x: Tensor, ctx: Context | Documents | None = None) -> Tensor:
        state = torch.zeros_like(x)
        for _ in range(self.passes):
            state = self.run(state + x, ctx)
        return state
