"""The schema for people and editors: JSON Schema with every registered node, and a readable table of keys."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from caramba.config.extension import NODE_MARK, NodeConfig
from caramba.config.manifest import Manifest
from caramba.config.source import is_list, is_mapping, is_sequence
from caramba.config.topology import TopologyConfig


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a manifest, its nodes a `oneOf` over every registered type."""
    schema = Manifest.model_json_schema()
    definitions: dict[str, Any] = schema.setdefault("$defs", {})
    for name, node in sorted(NodeConfig.registry.items()):
        own = node.model_json_schema()
        definitions.update(own.pop("$defs", {}))
        own["required"] = sorted({*own.get("required", []), "type"})
        definitions[node.__name__] = own
        assert own["properties"]["type"]["const"] == name
    definitions["Node"] = _one_of(list(NodeConfig.registry.values()))
    definitions["TopologyConfig"] = _one_of(
        [node for node in NodeConfig.registry.values() if issubclass(node, TopologyConfig)]
    )
    return _replace_marks(schema)


def _one_of(nodes: list[type[NodeConfig]]) -> dict[str, Any]:
    references = {node.__name__.removesuffix("Config"): f"#/$defs/{node.__name__}" for node in nodes}
    return {
        "oneOf": [{"$ref": reference} for reference in references.values()],
        "discriminator": {"propertyName": "type", "mapping": references},
    }


def _replace_marks(value: Any) -> Any:
    if is_mapping(value):
        if NODE_MARK in value:
            return {"$ref": "#/$defs/Node"}
        return {key: _replace_marks(item) for key, item in value.items()}
    return [_replace_marks(item) for item in value] if is_list(value) else value


def key_table() -> Iterator[tuple[str, str, str, str]]:
    """Yield (section, key, default, note) for every key of a manifest and of every node."""
    seen: set[type[BaseModel]] = set()
    pending: list[type[BaseModel]] = [Manifest, *NodeConfig.registry.values()]
    while pending:
        model = pending.pop(0)
        if model in seen or model is TopologyConfig:
            continue
        seen.add(model)
        for name, item in model.model_fields.items():
            pending.extend(_models_in(item.annotation))
            default = item.get_default(call_default_factory=True)
            shown = "required" if default is PydanticUndefined else _plain(default)
            yield model.__name__.removesuffix("Config"), name, shown, item.description or ""


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (types.UnionType, typing.Union, tuple, dict, typing.Annotated):
        found: list[type[BaseModel]] = []
        for item in typing.get_args(annotation):
            found.extend(_models_in(item))
        return found
    return []


def _plain(value: Any) -> str:
    if isinstance(value, BaseModel):
        return "{…}"
    if is_sequence(value):
        return "[" + ", ".join(_plain(item) for item in value) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
