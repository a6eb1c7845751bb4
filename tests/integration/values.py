"""JSON values that a schema of the OpenAPI document allows, small ones."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

MOST = 8  # tokens, items and characters: the answers have to come soon


def values_of(node: dict[str, Any], document: dict[str, Any]) -> st.SearchStrategy[Any]:
    if "$ref" in node:
        return values_of(document["components"]["schemas"][node["$ref"].rpartition("/")[2]], document)
    if "anyOf" in node:
        return st.one_of([values_of(one, document) for one in node["anyOf"]])
    if "const" in node:
        return st.just(node["const"])
    if "enum" in node:
        return st.sampled_from(node["enum"])
    low, high = node.get("minimum", node.get("exclusiveMinimum")), node.get("maximum")
    match node["type"]:
        case "object":
            if "properties" not in node:
                keys = st.text(st.characters(codec="utf-8"), max_size=MOST)
                return st.dictionaries(keys, values_of(node["additionalProperties"], document), max_size=3)
            assert node["additionalProperties"] is False
            parts = {key: values_of(value, document) for key, value in node["properties"].items()}
            needed = {key: parts.pop(key) for key in node.get("required", ())}
            return st.fixed_dictionaries(needed, optional=parts)
        case "array":
            return st.lists(
                values_of(node["items"], document),
                min_size=node.get("minItems", 0),
                max_size=node.get("maxItems", 4),
            )
        case "string":
            return st.text(st.characters(codec="utf-8"), min_size=node.get("minLength", 0), max_size=MOST)
        case "integer":
            first = int(low) + ("exclusiveMinimum" in node)
            return st.integers(first, first + MOST if high is None else min(first + MOST, high))
        case "number":
            return st.floats(low, high, exclude_min="exclusiveMinimum" in node)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
    raise AssertionError(f"the document has a type that the test does not know: {node}")
