"""Resolution of `${...}`: references to other keys and nothing else, so no resolver can read the environment."""

from __future__ import annotations

import re
from typing import Any

from caramba.config.expansion import MOST_DEPTH, MOST_NODES, MOST_TEXT, too_deep, too_large
from caramba.config.names import nearest
from caramba.config.narrowing import is_list, is_mapping
from caramba.config.source import Path, Source, format_place, is_index, show_path
from caramba.errors import ConfigError, quote

MISSING = "???"
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_KEY = re.compile(r"^\.*[A-Za-z0-9_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*$")


def resolve(tree: dict[str, Any], source: Source | None = None) -> dict[str, Any]:
    """Return `tree` with every `${a.b}` replaced by the value it names.

    `${a.b}` counts from the root, `${.b}` from the mapping that holds the value, `${..b}` from the one above. A bare
    `${d_model}` that is no root key but a key of `vars` means `${vars.d_model}`. Inside a longer text a reference is
    replaced by its text.

    Raises:
        ConfigError: a key that does not exist, a cycle, a resolver such as `${oc.env:HOME}`, or a `???` left unset.
    """
    return _Resolver(tree, source).value(tree, ())


class _Resolver:
    def __init__(self, tree: dict[str, Any], source: Source | None) -> None:
        self.n_nodes = self.n_characters = self.depth = 0
        self.tree = tree
        self.source = source
        self.open: list[Path] = []

    def value(self, value: Any, path: Path) -> Any:
        """Return a value with its references replaced; counts what they expand to."""
        self.n_nodes += 1
        self.n_characters += len(value) if isinstance(value, str) else 0
        if self.n_nodes > MOST_NODES or self.n_characters > MOST_TEXT:
            raise too_large(show_path(path))
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise too_deep(show_path(path[:8]))
        try:
            return self.expand(value, path)
        finally:
            self.depth -= 1

    def expand(self, value: Any, path: Path) -> Any:
        if is_mapping(value):
            return {key: self.value(item, (*path, key)) for key, item in value.items()}
        if is_list(value):
            return [self.value(item, (*path, index)) for index, item in enumerate(value)]
        if value == MISSING:
            raise self.error(path, "required, and still '???'; give it a value")
        if not isinstance(value, str) or "${" not in value:
            return value
        if path in self.open:
            raise self.error(path, f"{quote(value)} refers to itself; break the cycle")
        self.open.append(path)
        try:
            return self.text(value, path)
        finally:
            self.open.pop()

    def text(self, value: str, path: Path) -> Any:
        whole = _REFERENCE.fullmatch(value)
        if whole:
            return self.reference(whole[1].strip(), value, path)
        if "${" in _REFERENCE.sub("", value):
            raise self.error(
                path,
                f"{quote(value)} nests or leaves open a reference; only plain ${{path.to.key}} is allowed",
            )
        found = _REFERENCE.sub(lambda match: str(self.reference(match[1].strip(), value, path)), value)
        self.n_characters += len(found)
        if self.n_characters > MOST_TEXT:
            raise too_large(show_path(path))
        return found

    def reference(self, name: str, value: str, path: Path) -> Any:
        key = re.sub(r"\[([^\[\]]+)\]", r".\1", name)
        if not _KEY.match(key):
            raise self.error(
                path,
                f"{quote(value)} calls a resolver; a manifest may only refer to its own keys, as ${{path.to.key}}",
            )
        parts = key.lstrip(".").split(".")
        dots = len(key) - len(key.lstrip("."))
        start: Path = path[: len(path) - dots] if dots else ()
        root = self.at(start) if dots <= len(path) else None
        if not dots and is_mapping(root) and parts[0] not in root and parts[0] in (root.get("vars") or {}):
            parts = ["vars", *parts]
        node, target = root, start
        for part in parts:
            found, node, step = _child(node, part)
            if not found and isinstance(node, str) and "${" in node:
                node = self.value(node, target)
                found, node, step = _child(node, part)
            if not found:
                known = node if is_mapping(node) else {}
                raise self.error(
                    path,
                    f"{quote(value)} names a key that does not exist: {quote(name)}{nearest(part, known)}",
                )
            target = (*target, step)
        return self.value(node, target)

    def at(self, path: Path) -> Any:
        node: Any = self.tree
        for part in path:
            node = node[part]
        return node

    def error(self, path: Path, text: str) -> ConfigError:
        return ConfigError(f"{show_path(path)}: {text}{format_place(path, self.source)}")


def _child(node: Any, part: str) -> tuple[bool, Any, str | int]:
    """Return whether `part` exists in `node`, the child (or `node` itself when not), and the step taken."""
    if is_mapping(node) and part in node:
        return True, node[part], part
    if is_list(node) and is_index(part) and int(part) < len(node):
        return True, node[int(part)], int(part)
    return False, node, part
