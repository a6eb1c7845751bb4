"""What a plugin's schema classes must have, looked at before any manifest is read with them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Literal, get_args, get_origin

from caramba.config.extension import KINDS, ExtensionConfig
from caramba.config.layer_base import Decoding, LayerConfig
from caramba.config.node import NodeConfig, is_own, type_of
from caramba.config.plugin_target import check_target
from caramba.config.topology import TopologyConfig
from caramba.config.user_traceback import shown
from caramba.errors import ConfigError

METHODS = "parameter_shapes() and, without a field d_model, infer(width)"


def schemas_of(module: ModuleType) -> list[type[NodeConfig]]:
    """Return the schema classes that a module or package defines, and those of others that it imports by name."""
    name = module.__name__
    found = {
        schema: None
        for schema in _subclasses(NodeConfig)
        if is_own(schema) and _is_of(schema.__module__, name) and _is_live(schema)
    }
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, NodeConfig) and is_own(value):
            found[value] = None
    return list(found)


def check_types(module: ModuleType, schemas: list[type[NodeConfig]]) -> None:
    """Check the schema classes of a plugin.

    Raises:
        ConfigError: there is none, or one that cannot be used, with its file and line and what to change.
    """
    for schema in schemas:
        problem = _problem(schema)
        if problem is not None:
            raise ConfigError(f"{schema.__name__} {problem} ({place_of(schema)})")
    known = {type_of(schema): schema for schema in NodeConfig.registry.values() if not is_own(schema)}
    named: dict[str, type[NodeConfig]] = {}
    for schema in schemas:
        if "target" not in schema.__dict__:
            continue
        kind = type_of(schema)
        other = known.get(kind) or named.get(kind)
        if other is not None:
            theirs = f"{other.__module__}.{other.__name__}"
            raise ConfigError(
                f"{schema.__name__} answers to type {kind!r}, which {theirs} does already; rename the class and its "
                f"type ({place_of(schema)})"
            )
        named[kind] = schema
        check_target(schema, place_of(schema))
    if not named:
        file = getattr(module, "__file__", None)
        what = shown(file) if file else f"{next(iter(module.__path__))}, a folder without __init__.py,"
        raise ConfigError(
            f"adds no layer or extension: {what} has no subclass of caramba.config.LayerConfig or of "
            f"{', '.join(kind.__name__ for kind in KINDS)}; name the module that has the schema classes, or import "
            "them in this one"
        )


def place_of(schema: type) -> str:
    """Return file and line of a class."""
    file = inspect.getsourcefile(schema) or schema.__module__
    try:
        return f"{shown(file)}:{inspect.getsourcelines(schema)[1]}"
    except (OSError, TypeError):  # no source is there to be read
        return shown(file)


def _problem(schema: type[NodeConfig]) -> str | None:
    """Return what a schema class lacks, None where it can be used."""
    if issubclass(schema, TopologyConfig):
        return "is a topology, and plugins add layers; subclass caramba.config.LayerConfig"
    if issubclass(schema, ExtensionConfig):
        return _extension_problem(schema)
    if not issubclass(schema, LayerConfig):
        return "is no layer's schema; subclass caramba.config.LayerConfig"
    built_in = next((base for base in schema.__mro__ if "target" in base.__dict__ and not is_own(base)), None)
    if built_in is not None:
        return (
            f"is made from {built_in.__name__}, which caramba treats as its own layer wherever it meets one; subclass "
            "LayerConfig itself"
        )
    if "target" not in schema.__dict__:
        if any("target" in below.__dict__ for below in _subclasses(schema)):
            return None  # a base of the person's own layers
        return 'has no target of its own; add target = "module:Class", the torch module that it builds'
    return _type_problem(schema) or _method_problem(schema)


def _extension_problem(schema: type[ExtensionConfig]) -> str | None:
    kind = next((kind for kind in KINDS if issubclass(schema, kind)), None)
    if kind is None:
        return (
            f"is of no kind; subclass one of {', '.join(kind.__name__ for kind in KINDS)} of caramba.config"
        )
    if "target" not in schema.__dict__:
        if any("target" in below.__dict__ for below in _subclasses(schema)):
            return None
        return f'has no target; add target = "module:Class", with {kind.signature()}'
    return _type_problem(schema)


def _type_problem(schema: type[NodeConfig]) -> str | None:
    kind = type_of(schema)
    annotation = schema.model_fields["type"].annotation
    if get_origin(annotation) is not Literal or get_args(annotation) != (kind,):
        return f'needs its type by name; add type: Literal["{kind}"] = "{kind}"'
    return None


def _method_problem(schema: type[LayerConfig]) -> str | None:
    if schema.parameter_shapes is LayerConfig.parameter_shapes:
        return (
            "does not define parameter_shapes(), so its weights would count as none; return the shape of each by name, "
            'such as {"weight": (self.d_model, self.d_model)}, or {} where it has none'
        )
    if schema.infer is LayerConfig.infer and "d_model" not in schema.model_fields:
        return "has no field d_model and does not define infer(width), so no width can be checked; add one of them"
    if schema.decoding not in get_args(Decoding):
        return f"has decoding = {schema.decoding!r}; expected one of {', '.join(get_args(Decoding))}"
    has_streams = schema.cached_streams is not LayerConfig.cached_streams
    if (schema.decoding == "cached") != has_streams:
        return (
            'has decoding = "cached" and does not define cached_streams(); return (name, heads, width) of what it '
            "keeps of every token"
            if schema.decoding == "cached"
            else f'defines cached_streams() with decoding = {schema.decoding!r}; set decoding = "cached", or remove it'
        )
    return None


def _subclasses(base: type[NodeConfig]) -> Iterator[type[NodeConfig]]:
    for schema in base.__subclasses__():
        yield schema
        yield from _subclasses(schema)


def _is_of(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _is_live(schema: type) -> bool:
    """Whether a class is what its module has under its name: one of an import that failed waits to be cleared away."""
    return vars(sys.modules.get(schema.__module__, schema)).get(schema.__name__) is schema
