"""Turns a node's config into the module that its `target` names."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from torch import nn

from caramba.config.node import NodeConfig
from caramba.errors import ConfigError


def build_node(config: NodeConfig) -> nn.Module:
    """Build a layer or a topology; the class is looked up by the config's `target`, "module:Class".

    Raises:
        ConfigError: the target cannot be imported, or is no torch module.
    """
    module_name, _, class_name = config.target.partition(":")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{config.type}: cannot find target {config.target!r} ({error}); expected 'package.module:Class'"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ConfigError(f"{config.type}: target {config.target!r} is not a torch.nn.Module class; name one")
    return cls(config)


def build_nodes(configs: Sequence[NodeConfig]) -> nn.ModuleList:
    """Build each config's module, in order."""
    return nn.ModuleList(build_node(config) for config in configs)
