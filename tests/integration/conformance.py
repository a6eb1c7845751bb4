"""What of a JSON value a schema of the OpenAPI document does not allow, by a reading of JSON Schema of its own."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

IS: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: type(value) is int or (type(value) is float and isfinite(value)),
    "integer": lambda value: IS["number"](value) and value == int(value),
}
HOLDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "minimum": ("number", lambda value, bound: value >= bound),
    "maximum": ("number", lambda value, bound: value <= bound),
    "exclusiveMinimum": ("number", lambda value, bound: value > bound),
    "exclusiveMaximum": ("number", lambda value, bound: value < bound),
    "minLength": ("string", lambda value, bound: len(value) >= bound),
    "minItems": ("array", lambda value, bound: len(value) >= bound),
    "maxItems": ("array", lambda value, bound: len(value) <= bound),
}
NOTES = {"title", "description", "default"}
PARTS = {"$ref", "anyOf", "not", "const", "enum", "type"}
INSIDE = {"items", "required", "properties", "additionalProperties"}


def faults(value: Any, node: dict[str, Any], document: dict[str, Any], at: str = "$") -> list[str]:
    """Return a line for each place where a value is none of a schema's; none where it is.

    An object's keys have to be among those that are described, if any are: JSON Schema leaves that open where
    `additionalProperties` is missing, but a client that is made from the document knows no others.
    """
    unknown = node.keys() - NOTES - PARTS - INSIDE - HOLDS.keys()
    assert not unknown, f"the document has keys that the test does not know: {unknown}"
    found: list[str] = []
    if "$ref" in node:
        name = node["$ref"].removeprefix("#/components/schemas/")
        found += faults(value, document["components"]["schemas"][name], document, at)
    if "anyOf" in node and all(faults(value, one, document, at) for one in node["anyOf"]):
        found.append(f"{at}: {value!r} is none of {node['anyOf']}")
    open_keys = {"additionalProperties": True}  # more keys make no value another than the one that is ruled out
    if "not" in node and not faults(value, open_keys | node["not"], document, at):
        found.append(f"{at}: {value!r} is {node['not']}")
    if "type" in node and not IS[node["type"]](value):
        return [*found, f"{at}: {value!r} is no {node['type']}"]
    allowed = [node["const"]] if "const" in node else node.get("enum")
    # True == 1 in Python, and no two of these are equal in JSON.
    if allowed is not None and not any(type(value) is type(one) and value == one for one in allowed):
        found.append(f"{at}: {value!r} is none of {allowed}")
    for key in node.keys() & HOLDS.keys():
        kind, holds = HOLDS[key]
        if IS[kind](value) and not holds(value, node[key]):
            found.append(f"{at}: {value!r} is against {key} {node[key]}")
    if isinstance(value, list) and "items" in node:
        for index, item in enumerate(value):
            found += faults(item, node["items"], document, f"{at}[{index}]")
    if isinstance(value, dict):
        found += _faults_of_object(value, node, document, at)
    return found


def _faults_of_object(value: dict[str, Any], node: dict[str, Any], document: dict[str, Any], at: str) -> list[str]:
    parts, rest = node.get("properties", {}), node.get("additionalProperties")
    found = [f"{at}: no {key}" for key in node.get("required", ()) if key not in value]
    for key, item in value.items():
        if key in parts:
            found += faults(item, parts[key], document, f"{at}.{key}")
        elif isinstance(rest, dict):
            found += faults(item, rest, document, f"{at}.{key}")
        elif rest is not True and (parts or rest is False):
            found.append(f"{at}: {key} is not described")
    return found
