"""Reference pages of every key of a manifest, from its JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from markdown_cells import cell, code, heading, table

from caramba.config.schema import json_schema

Schema = dict[str, Any]

# Page -> title, sentence, and the definitions it begins with. A definition is on the first page that reaches it.
PAGES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "model": (
        "Keys of a model",
        "Everything under `model`, and the nodes of a topology.",
        ("ModelConfig", "FitConfig", "TopologyConfig", "Node"),
    ),
    "training": (
        "Keys of training",
        "The keys of one phase. `train.KEY` sets a key for every phase.",
        ("PhaseConfig",),
    ),
    "data": ("Keys of data", "Everything under `data`.", ("DataConfig",)),
    "inference": (
        "Keys of inference",
        "What `mode: sample` and `mode: chat` accept.",
        ("GenerateConfig", "SampleConfig", "ChatConfig"),
    ),
    "verification": (
        "Keys of verification",
        "Everything under `verify`.",
        ("CompareVerifyConfig", "FidelityVerifyConfig", "KVCacheVerifyConfig", "EvalVerifyConfig"),
    ),
    "benchmarks": ("Keys of benchmarks", "What a suite under `benchmark` consists of.", ("BenchmarkConfig",)),
    "papers": (
        "Keys of papers",
        "Everything under `paper`, `review` and `research`.",
        ("PaperConfig", "ReviewConfig", "ResearchLoopConfig"),
    ),
    "experiment": ("Keys of a manifest", "The top level of a manifest, its groups and runs.", ()),
}
INDEX = "experiment"


def pages() -> dict[str, str]:
    """Return {page: Markdown}: every property of every definition is on exactly one page."""
    schema = json_schema()
    definitions: dict[str, Schema] = schema["$defs"]
    page_of = assign_pages(schema)
    written = {}
    for page, (title, sentence, _) in PAGES.items():
        lines = [f"# {title}", "", sentence, ""]
        if page == INDEX:
            lines += _section("Manifest", schema, page, page_of)
        for name, owner in page_of.items():
            if owner == page and definitions[name].get("properties"):
                lines += _section(name, definitions[name], page, page_of)
            elif owner == page:
                lines += _values(name, definitions[name], page, page_of)
        written[page] = "\n".join(lines)
    return written


def assign_pages(schema: Schema) -> dict[str, str]:
    """Return {definition: page}."""
    definitions: dict[str, Schema] = schema["$defs"]
    page_of: dict[str, str] = {}
    for page, (_, _, roots) in PAGES.items():
        pending = [*roots] or list(definitions)
        while pending:
            name = pending.pop(0)
            if name not in page_of and name in definitions:
                page_of[name] = page
                pending.extend(_references(definitions[name]))
    return page_of


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"].rpartition("/")[2]
        for item in value.values():
            yield from _references(item)
    elif isinstance(value, list):
        for item in value:
            yield from _references(item)


def _section(name: str, schema: Schema, page: str, page_of: dict[str, str]) -> list[str]:
    required = schema.get("required", [])
    rows = [
        [
            code(key),
            _type(item, page, page_of),
            "required" if key in required and "default" not in item else _default(item),
            cell(item.get("description", "")),
        ]
        for key, item in schema["properties"].items()
    ]
    text = [] if name == "Manifest" else [*_paragraphs(schema.get("description", ""))]
    return [*heading(shown(name), name), *text, *table(["key", "values", "default", "meaning"], rows)]


def _values(name: str, schema: Schema, page: str, page_of: dict[str, str]) -> list[str]:
    """Describe a definition without keys: an enumeration or a choice of definitions."""
    text = _paragraphs(schema.get("description", ""))
    return [*heading(shown(name), name), *text, f"Values: {_type(schema, page, page_of)}.", ""]


def _paragraphs(text: str) -> list[str]:
    return [part for block in text.split("\n\n") for part in (" ".join(block.split()), "") if block.strip()]


def shown(name: str) -> str:
    """Return the name of a definition as a manifest writes it."""
    return name.removesuffix("Config")


def _default(item: Schema) -> str:
    if "default" not in item:
        return ""
    value = item["default"]
    if isinstance(value, dict) and value:
        return "see its table"
    return code(value if isinstance(value, str) and value else json.dumps(value))


def _type(item: Schema, page: str, page_of: dict[str, str]) -> str:
    """Return the allowed values of a property."""
    if "$ref" in item:
        return _link(item["$ref"].rpartition("/")[2], page, page_of)
    for key in ("anyOf", "oneOf", "allOf"):
        if key in item:
            return " or ".join(dict.fromkeys(_type(part, page, page_of) for part in item[key]))
    if "const" in item:
        return code(item["const"])
    if "enum" in item:
        return ", ".join(code(value) for value in item["enum"])
    kind = item.get("type", "any")
    if kind == "array":
        return f"list of {_type(item.get('items', {}), page, page_of)}"
    if kind == "object":
        inner = item.get("additionalProperties")
        return f"mapping to {_type(inner, page, page_of)}" if isinstance(inner, dict) else "mapping"
    return {"boolean": "`true`, `false`", "null": "`null`", "string": "text"}.get(kind, kind) + _bounds(item)


def _bounds(item: Schema) -> str:
    low, high = item.get("minimum"), item.get("maximum")
    parts = [
        f">= {low}" if low is not None else "",
        f"> {item['exclusiveMinimum']}" if "exclusiveMinimum" in item else "",
        f"<= {high}" if high is not None and high < 2**62 else "",
        f"< {item['exclusiveMaximum']}" if "exclusiveMaximum" in item else "",
    ]
    text = " and ".join(part for part in parts if part)
    return f" {text}" if text else ""


def _link(name: str, page: str, page_of: dict[str, str]) -> str:
    target = "" if page_of[name] == page else f"{page_of[name]}.md"
    return f"[{shown(name)}]({target}#{name.lower()})"
