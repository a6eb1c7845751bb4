"""Resolution of `${...}`: references to other keys and nothing else, so no resolver can read the environment."""

from __future__ import annotations

import functools
import re
from pathlib import Path as File
from typing import Any

from caramba.config.source import Path, SourceMap, format_place, is_index, is_list, is_mapping, show_path
from caramba.errors import ConfigError, nearest, quote

MOST_FILE_BYTES = 8_000_000
MOST_OPTION_BYTES = 250_000
"""Of a group option: Hydra reads it several times, in up to 2.5 s for 1 MB."""
MOST_NODES = 30_000
"""Keys, list items and scalars after expansion. The largest preset has under 2,000."""
MOST_OPTION_NODES = 5_000
"""Of a group option: Hydra merges it several times, and takes 0.3 ms a node."""
MOST_TEXT = 8_000_000
"""Characters of all scalars after expansion."""
MOST_DIGITS = 100
"""Of a whole number. Python refuses to print one of over 4,300."""
MOST_DEPTH = 64
"""Mappings and lists inside each other. The presets have under 15."""


def read_text(file: File, name: str, most_bytes: int = MOST_FILE_BYTES) -> str:
    """Return the text of a YAML file, of which no more is read than `most_bytes`.

    Raises:
        ConfigError: the file is larger, cannot be read, or is not UTF-8.
    """
    try:
        with open(file, "rb") as stream:
            data = stream.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise ConfigError(f"{name}: over {most_bytes:,} bytes, expected at most that; shorten the file")
        return data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read ({error.strerror}); give a YAML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not UTF-8 text (byte {error.start + 1}); save it as UTF-8") from None


def load_nodes(text: str, name: str, most_nodes: int = MOST_NODES) -> Any:
    """Return the nodes of a YAML text, None if it is empty, after a check of the limits.

    Nothing is expanded: an anchor's size is counted once and added for each alias. Scalars are resolved as by
    OmegaConf: `1e3` is a number, a date is a text.

    Raises:
        ConfigError: the text is larger, deeper, or expands to more than the limits, or an anchor contains itself.
        yaml.YAMLError: the text is not YAML.
    """
    import yaml

    # Every node of a text follows one of these.
    n_marks = sum(text.count(mark) for mark in (",", "[", "{", "\n", ": ", "- "))
    if n_marks > 4 * MOST_NODES:
        raise too_large(name, most_nodes)
    try:
        root: Any = _loader()(text).get_single_node()
    except RecursionError:
        raise too_deep(name) from None
    except yaml.YAMLError as error:
        if "nesting" in str(error):  # libyaml's own limit
            raise too_deep(name) from None
        raise
    if root is not None:
        _check(root, name, most_nodes)
    return root


def load_tree(text: str, name: str) -> Any:
    """Return what a YAML text holds, as `load_nodes` checks it.

    Raises:
        ConfigError: as `load_nodes`, or a value that is no mapping, list, text, number, boolean or null.
        yaml.YAMLError: the text is not YAML, or a mapping has a key twice.
    """
    root = load_nodes(text, name)
    return None if root is None else _loader()("").construct_document(root)


@functools.cache
def _loader() -> Any:
    """Return the loader: libyaml's parser where PyYAML has it, ten times as fast, under the rules of OmegaConf."""
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set[str]()
            for key, _ in node.value:
                if key.tag == "tag:yaml.org,2002:str" and key.value in seen:
                    text = f"found duplicate key {quote(key.value)}"
                    raise yaml.constructor.ConstructorError(None, None, text, key.start_mark)
                if isinstance(key.value, str):
                    seen.add(key.value)
            made: Any = super()
            return made.construct_mapping(node, deep=deep)

    plain = {"map", "seq", "str", "int", "float", "bool", "null", "merge", "value"}
    tags = {f"tag:yaml.org,2002:{name}" for name in plain}
    Loader.yaml_constructors = {tag: made for tag, made in base.yaml_constructors.items() if tag in tags or tag is None}
    Loader.yaml_implicit_resolvers = {
        first: [(tag, form) for tag, form in resolvers if tag in tags]
        for first, resolvers in base.yaml_implicit_resolvers.items()
    }
    exponents = re.compile(r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", exponents, list("-+0123456789."))
    return Loader


def too_deep(name: str) -> ConfigError:
    """Return the error about nesting."""
    return ConfigError(f"{name}: nests deeper than {MOST_DEPTH} levels; flatten it")


def too_large(name: str, most_nodes: int = MOST_NODES) -> ConfigError:
    """Return the error about what anchors or references expand to."""
    return ConfigError(
        f"{name}: anchors or references expand to more than {most_nodes:,} values or {MOST_TEXT:,} characters; "
        "repeat less"
    )


def _check(root: Any, name: str, most_nodes: int) -> None:
    """Count nodes, text and depth after expansion, each node of the graph once."""
    sizes: dict[int, tuple[int, int, int]] = {}
    paths: dict[int, Path] = {id(root): ()}
    active: set[int] = set()
    stack: list[tuple[Any, bool]] = [(root, False)]
    while stack:
        node, is_counted = stack.pop()
        key = id(node)
        if key in sizes:
            continue
        children = _children(node)
        if not is_counted and children:
            if len(active) > MOST_DEPTH:
                raise too_deep(_where(node, name, paths))
            active.add(key)
            stack.append((node, True))
            for label, child in children:
                if id(child) in active:
                    raise ConfigError(
                        f"{name}:{child.start_mark.line + 1}: an anchor contains itself; remove its alias"
                    )
                paths.setdefault(id(child), paths[key] if label is None else (*paths[key], label))
                stack.append((child, False))
            continue
        active.discard(key)
        parts = [sizes[id(child)] for _, child in children]
        nodes = 1 + sum(part[0] for part in parts)
        text = (len(node.value) if isinstance(node.value, str) else 0) + sum(part[1] for part in parts)
        depth = 1 + max((part[2] for part in parts), default=0)
        if node.tag == "tag:yaml.org,2002:int" and len(node.value) > MOST_DIGITS:
            raise ConfigError(
                f"{_where(node, name, paths)}: a whole number of {len(node.value):,} digits, expected at most "
                f"{MOST_DIGITS}; write fewer"
            )
        if depth > MOST_DEPTH:
            raise too_deep(_where(node, name, paths))
        if nodes > most_nodes or text > MOST_TEXT:
            raise too_large(_where(node, name, paths), most_nodes)
        sizes[key] = (nodes, text, depth)


def _where(node: Any, name: str, paths: dict[int, Path]) -> str:
    path = show_path(paths[id(node)])
    return f"{name}:{node.start_mark.line + 1}{': ' + path if path else ''}"


def _children(node: Any) -> list[tuple[str | int | None, Any]]:
    """Return the nodes inside a node, each with its part of the path; a key is at the path of its mapping."""
    if isinstance(node.value, str):
        return []
    found: list[tuple[str | int | None, Any]] = []
    items: list[Any] = node.value  # of a mapping pairs of nodes, of a list nodes
    if node.id == "sequence":
        return list(enumerate(items))
    for key, value in items:
        found += [(None, key), (key.value if isinstance(key.value, str) else "?", value)]
    return found


MISSING = "???"
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_KEY = re.compile(r"^\.*[A-Za-z0-9_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*$")


def resolve(tree: dict[str, Any], source: SourceMap | None = None) -> dict[str, Any]:
    """Return `tree` with every `${a.b}` replaced by the value it names.

    `${a.b}` counts from the root, `${.b}` from the mapping that holds the value, `${..b}` from the one above. A bare
    `${d_model}` that is no root key but a key of `vars` means `${vars.d_model}`. Inside a longer text a reference is
    replaced by its text.

    Raises:
        ConfigError: a key that does not exist, a cycle, a resolver such as `${oc.env:HOME}`, or a `???` left unset.
    """
    return _Resolver(tree, source).value(tree, ())


def _instead(name: str) -> str:
    """Return how what a resolver of Hydra or OmegaConf gives is had here."""
    resolver, _, rest = name.partition(":")
    variable = rest.partition(",")[0].strip()
    ways = {
        "oc.env": f'; the shell puts a variable in: KEY="${variable}", or vars.NAME="${variable}" for ${{vars.NAME}}',
        "now": "; the folder of a run has its date and time",
        "hydra": "; name=NAME sets the folder, runs/NAME/ID, and env.json has the machine",
        "oc.select": f"; write ${{{variable}}}",
    }
    return ways.get(resolver, "")


class _Resolver:
    def __init__(self, tree: dict[str, Any], source: SourceMap | None) -> None:
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
                f"{quote(value)} calls a resolver; a manifest may only refer to its own keys, as ${{path.to.key}}"
                f"{_instead(name)}",
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
