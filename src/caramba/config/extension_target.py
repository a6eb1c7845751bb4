"""The class of an extension: imported, checked against the signature of its kind, and built."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from caramba.config.extension import ExtensionConfig, types_kept
from caramba.config.user_traceback import user_traceback
from caramba.errors import ConfigError


def load_class(config: ExtensionConfig) -> type:
    """Import the class that an extension's `target` names.

    Raises:
        ConfigError: the import fails, or the class is not of its kind, with the expected signature.
    """
    where = f"{config.key}: {config.type}"
    module, _, name = config.target.partition(":")
    try:
        with types_kept():
            found = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise ConfigError(
            f"{where}: cannot import target {config.target!r}: {user_traceback(error)}"
        ) from error
    problem = _problem(config, found)
    if problem is not None:
        raise ConfigError(f"{where}: target {config.target!r} {problem}; expected {config.signature()}")
    return found


def build_extension(config: ExtensionConfig, *arguments: Any) -> Any:
    """Build an extension.

    Raises:
        ConfigError: as `load_class`, or the constructor fails.
    """
    cls = load_class(config)
    try:
        return cls(*arguments)
    except Exception as error:
        raise ConfigError(f"{config.key}: {config.type} cannot be built: {user_traceback(error)}") from error


def _problem(config: ExtensionConfig, found: Any) -> str | None:
    if not isinstance(found, type):
        return "is no class"
    if config.base is not None:
        module, _, name = config.base.partition(":")
        if not issubclass(found, getattr(importlib.import_module(module), name)):
            return f"is no subclass of {name}"
    for method, arguments in config.methods.items():
        function = getattr(found, method, None)
        if function is None:
            return f"has no {method}"
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # of C code
            continue
        try:
            signature.bind(None, *arguments)
        except TypeError:
            return f"has {method}{signature}"
    return None
