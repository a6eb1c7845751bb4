"""From plain data to a validated schema, with errors in a user's words: where, got, expected, nearest name, fix."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from caramba.config.base import SLUG, Config, refuse_executable
from caramba.config.source import Path, SourceMap, format_place, is_mapping, is_sequence, retrace, show_path
from caramba.errors import ConfigError, clip, nearest, quote

MOST_ERRORS = 10
MOST_CHARACTERS = 1900
"""Characters of the problems that are shown, but for one that is longer alone."""
LONGEST_PROBLEM = 1500
_UNSHOWN = ("key_env", "api_key", "password", "secret")
"""Keys under which a user may have written a secret in place of its name."""
_KNOWN_KEYS = re.compile(r" Known (?:keys|types): [^\n]*?(?= \(|$)")
_PATTERNS = {SLUG: "letters, digits, '.', '_' and '-', of which the first is a letter or a digit"}
Schema = TypeVar("Schema", bound=Config)


def parse_as(
    schema: type[Schema],
    data: Any,
    *,
    source: SourceMap | None = None,
    origins: Mapping[Path, Path] | None = None,
    typed: Any = None,
) -> Schema:
    """Validate `data` as `schema`.

    `source` maps values to files and lines, `origins` which of the user's paths became which path of the manifest,
    and `typed` is the tree that the user's paths lead through.

    Raises:
        ConfigError: every problem, one line each.
    """
    origins = origins or {}
    try:
        refuse_executable(data)
    except PydanticCustomError as error:
        context = error.context or {}
        path = retrace((*context["path"], context["key"]), origins)
        raise ConfigError(f"{show_path(path)}: {error.message()}{format_place(path, source)}") from None
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        lines = error_lines(error, data, source, origins, typed)
    if len(lines) == 1:
        raise ConfigError(lines[0])
    shown = _fitting(lines)
    more = f"\n  … and {len(lines) - len(shown)} more" if len(lines) > len(shown) else ""
    raise ConfigError(f"{len(lines)} problems:\n  " + "\n  ".join(shown) + more)


def _fitting(lines: list[str]) -> list[str]:
    """Return the first lines that fit a message; a list of known keys is shown once."""
    shown, lists, n_left = list[str](), set[str](), MOST_CHARACTERS
    for line in lines[:MOST_ERRORS]:
        known = _KNOWN_KEYS.search(line)
        if known is not None and known[0] in lists:
            line = line.replace(known[0], "")
        elif known is not None:
            lists.add(known[0])
        n_left -= len(line)
        if shown and n_left < 0:
            break
        shown.append(line)
    return shown


# Of a list with a wrong item: it lacks one then, or could have been one name in place of several.
KNOCK_ON = ("too_short", "literal_error")


def error_lines(
    error: ValidationError, data: Any, source: SourceMap | None, origins: Mapping[Path, Path], typed: Any
) -> list[str]:
    """One line per distinct place, knock-on errors dropped, the branches of a union joined."""
    found: dict[Path, list[ErrorDetails]] = {}
    aliases = functools.cache(_aliases_of)
    for item in error.errors(include_url=False):
        tag = str(item.get("ctx", {}).get("discriminator", "")).strip("'")
        loc = (*item["loc"], tag) if item["type"] == "union_tag_invalid" else item["loc"]
        found.setdefault(_real_path(loc, data, aliases), []).append(item)
    parents = {path[:length] for path in found for length in range(len(path))}
    lines: dict[str, None] = {}  # in order, each once
    for path, items in found.items():
        if all(item["type"] in KNOCK_ON for item in items) and path in parents:
            continue
        user = retrace(path, origins)
        if typed is not None:
            user = _real_path(user, typed, aliases)
        text = clip(_explain(items, is_shown=not _is_secret_place(path)), LONGEST_PROBLEM)
        line = f"{show_path(user) + ': ' if user else ''}{text}{_place(path, text, user, source, origins)}"
        lines[line] = None
    return list(lines)


def _place(path: Path, text: str, user: Path, source: SourceMap | None, origins: Mapping[Path, Path]) -> str:
    """Where a problem was written; for a rule between keys, one of those it names, a typed one first."""
    places = [format_place(retrace((*path, key), origins), source) for key in re.findall(r"\b([a-z_]+)=", text)]
    whole = format_place(user, source)
    typed = [place for place in (*places, whole) if place.startswith(" (command line")]
    return next((place for place in (*typed, *places, whole) if place), "")


def _real_path(loc: Path, data: Any, aliases: Callable[[str], list[str]]) -> Path:
    """Drop what pydantic adds to a location (union tags and branches) and restore the alias that the user typed."""
    path: list[str | int] = []
    node = data
    for index, part in enumerate(loc):
        if is_mapping(node):
            name = _typed_name(str(part), node, aliases)
            if name in node:
                path.append(name)
                node = node[name]
            elif index == len(loc) - 1:
                path.append(part)
        elif is_sequence(node) and isinstance(part, int) and part < len(node):
            path.append(part)
            node = node[part]
    return tuple(path)


def _typed_name(name: str, node: dict[Any, Any], aliases: Callable[[str], list[str]]) -> str:
    if name in node:
        return name
    return next((alias for alias in aliases(name) if alias in node), name)


def _aliases_of(name: str) -> list[str]:
    pending: list[type[Config]] = [Config]
    found: list[str] = []
    while pending:
        schema = pending.pop()
        pending.extend(schema.__subclasses__())
        found.extend(alias for alias, target in schema.aliases.items() if target == name)
    return found


def _is_secret_place(path: Path) -> bool:
    return any(isinstance(part, str) and part.lower().endswith(_UNSHOWN) for part in path)


def _explain(items: list[ErrorDetails], *, is_shown: bool = True) -> str:
    first = items[0]
    kind, context = first["type"], first.get("ctx", {})
    if kind in ("unknown_type", "unknown_key"):
        if kind == "unknown_key" and str(context["hint"]).startswith(";"):
            return f"unknown key{context['hint']}"
        got = f"{quote(first['input'])} " if kind == "unknown_type" else ""
        return f"{got}{first['msg']}"
    if kind == "missing":
        return "required, and not given"
    if kind == "union_tag_invalid":
        tags = _quoted(str(context["expected_tags"]))
        hint = nearest(context["tag"], tags) or ";"
        return f"{quote(context['tag'])} unknown type{hint} one of: {', '.join(tags)}"
    if kind == "union_tag_not_found":
        return f"needs the key {context['discriminator']}, which sets its kind"
    if kind == "value_error":
        return first["msg"].removeprefix("Value error, ")
    if kind == "string_pattern_mismatch":
        pattern = context["pattern"]
        form = _PATTERNS.get(pattern, f"a text of the form {pattern}")
        return f"got {_short(first['input'], is_shown)}, expected {form}"
    if not first["msg"].startswith("Input should be"):
        return first["msg"]
    return _expected(items, is_shown)


def _expected(items: list[ErrorDetails], is_shown: bool) -> str:
    value = items[0]["input"]
    wanted: list[str] = []
    choices: list[str] = []
    for item in items:
        text = item["msg"].removeprefix("Input should be ")
        if item["type"] in ("literal_error", "enum"):
            choices.extend(_quoted(str(item.get("ctx", {}).get("expected", ""))))
        if text not in wanted:
            wanted.append(text)
    hint = nearest(value, choices) if isinstance(value, str) else ""
    return f"got {_short(value, is_shown)}, expected {' or '.join(wanted)}{hint}"


def _quoted(text: str) -> list[str]:
    return re.findall(r"'([^']*)'", text)


def _short(value: Any, is_shown: bool) -> str:
    return quote(value) if is_shown else "a value that may be a secret, not shown"
