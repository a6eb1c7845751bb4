"""Nodes of a topology: `type` names a schema class, and the schema class names the module that it builds."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ValidationError, WithJsonSchema
from pydantic_core import InitErrorDetails, PydanticCustomError

from caramba.config.base import Config, nearest, refuse_executable
from caramba.config.cost import Cost, Width
from caramba.config.narrowing import is_mapping
from caramba.config.user_traceback import user_traceback
from caramba.errors import ConfigError


class NodeConfig(Config):
    """A layer or topology. `target` is "module:Class", resolved only when a model is built, so schemas need no torch.

    A subclass `FooConfig` answers to `type: Foo`. Subclassing registers it, which is how a plugin adds a layer.
    """

    target: ClassVar[str]
    registry: ClassVar[dict[str, type[NodeConfig]]] = {}

    type: Any  # every subclass narrows it to the one literal that it answers to

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "target" in cls.__dict__:
            NodeConfig.registry[type_of(cls)] = cls

    def infer(self, width: Width) -> Cost:
        """Check the width that comes in and return what the node costs.

        Raises:
            WidthError: the node, or one inside, does not take this width.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define infer(width) -> Cost")


@contextlib.contextmanager
def types_kept() -> Generator[None]:
    """Within, what is imported adds no types: those of a person's own are known while a manifest is read that names
    their plugin, and none takes the place of caramba's."""
    before = dict(NodeConfig.registry)
    try:
        yield
    finally:
        NodeConfig.registry.clear()
        NodeConfig.registry.update(before)


def type_of(schema: type[NodeConfig]) -> str:
    """Return the `type` that a schema class answers to."""
    return schema.__name__.removesuffix("Config")


def is_own(schema: type[NodeConfig]) -> bool:
    """Whether a schema class is a person's own, and no part of caramba: nothing but its methods is known of it."""
    return schema.__module__.partition(".")[0] != "caramba"


def parse_node(value: Any) -> Any:
    """Validate a mapping as the node that its `type` names.

    Raises:
        PydanticCustomError: no `type`, or one that no schema class answers to (with the nearest name).
    """
    if isinstance(value, NodeConfig):
        return value
    if not is_mapping(value):
        raise PydanticCustomError(
            "node_type",
            "expected a mapping with a `type`, such as {example}",
            {"example": "{type: RMSNormLayer, d_model: 64}"},
        )
    if "type" not in value:
        refuse_executable(value)
        raise PydanticCustomError(
            "missing_type",
            "a node needs a `type`; one of: {known}",
            {"known": ", ".join(sorted(NodeConfig.registry))},
        )
    schema = NodeConfig.registry.get(str(value["type"]))
    if schema is None:
        hint = nearest(value["type"], NodeConfig.registry) or "."
        error = PydanticCustomError(
            "unknown_type",
            "unknown type{hint} Known types: {known} (a layer of your own: name its module in plugins)",
            {"hint": hint, "known": ", ".join(sorted(NodeConfig.registry))},
        )
        details = InitErrorDetails(type=error, loc=("type",), input=value["type"])
        raise ValidationError.from_exception_data("Node", [details])
    if hasattr(schema, "key"):  # an extension, whose place is another key
        raise PydanticCustomError(
            "extension_kind",
            "type {name} is no layer; its place is {key}",
            {"name": str(value["type"]), "key": str(getattr(schema, "key", ""))},
        )
    return parse_typed(schema, value)


def parse_typed(schema: type[NodeConfig], value: Any) -> Any:
    """Validate a mapping as a registered schema; what fails in a class of a plugin is reported with its name.

    Raises:
        ConfigError: a rule of a plugin's class raises other errors than pydantic expects.
    """
    if not is_own(schema):
        return schema.model_validate(value)
    try:
        return schema.model_validate(value)
    except ValidationError:
        raise
    except Exception as error:  # what pydantic does not turn into a problem of the value
        raise ConfigError(f"the rules of {schema.__name__} failed: {user_traceback(error)}") from error


# The JSON schema of a node is the union of every registered class, which only `caramba.config.schema` can write out.
NODE_MARK = "x-caramba-node"
Node = Annotated[Any, BeforeValidator(parse_node), WithJsonSchema({NODE_MARK: True})]
