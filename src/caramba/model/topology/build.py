"""Turns a node's config into the module that its `target` names."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from caramba.config.extension import NodeConfig, is_own, types_kept
from caramba.config.layer_base import LayerConfig
from caramba.config.topology import is_own_layer
from caramba.config.user_traceback import user_traceback
from caramba.errors import ConfigError

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
        why = (
            user_traceback(error) if is_own(type(config)) and not isinstance(error, AttributeError) else error
        )
        raise ConfigError(
            f"{config.type}: cannot find target {config.target!r} ({why}); expected 'package.module:Class'"
        ) from error
    except Exception as error:
        if not is_own(type(config)):
            raise
        raise ConfigError(
            f"{config.type}: cannot import target {config.target!r}: {user_traceback(error)}"
        ) from error
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
    if is_lazy(
        parameter
    ):  # made at the first forward, when the optimiser and the checkpoint are made already
        return "a lazy parameter without a shape"
    return tuple(parameter.shape)
