"""Limits on what a manifest expands to: a few hundred bytes of anchors or references can stand for gigabytes."""

from __future__ import annotations

from typing import Any

from caramba.errors import ConfigError

MOST_FILE_BYTES = 8_000_000
MOST_NODES = 200_000
"""Keys, list items and scalars after expansion. The largest preset has under 2,000."""
MOST_TEXT = 8_000_000
"""Characters of all scalars after expansion."""
MOST_DEPTH = 100
"""Mappings and lists inside each other. The presets have under 15."""


def load_nodes(text: str, name: str) -> Any:
    """Return the nodes of a YAML text, None if it is empty, after a check of the limits.

    Nothing is expanded: an anchor's size is counted once and added for each alias.

    Raises:
        ConfigError: the text is larger, deeper, or expands to more than the limits, or an anchor contains itself.
        yaml.YAMLError: the text is not YAML.
    """
    import yaml

    compose: Any = yaml.compose  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if len(text) > MOST_FILE_BYTES:
        raise ConfigError(
            f"{name}: has {len(text):,} characters, expected at most {MOST_FILE_BYTES:,}; shorten the file"
        )
    try:
        root: Any = compose(text, Loader=yaml.SafeLoader)
    except RecursionError:
        raise too_deep(name) from None
    if root is not None:
        _check(root, name)
    return root


def too_deep(name: str) -> ConfigError:
    """Return the error about nesting."""
    return ConfigError(f"{name}: nests deeper than {MOST_DEPTH} levels; flatten it")


def too_large(name: str) -> ConfigError:
    """Return the error about what anchors or references expand to."""
    return ConfigError(
        f"{name}: anchors or references expand to more than {MOST_NODES:,} values or {MOST_TEXT:,} characters; "
        "repeat less"
    )


def _check(root: Any, name: str) -> None:
    """Count nodes, text and depth after expansion, each node of the graph once."""
    sizes: dict[int, tuple[int, int, int]] = {}
    active: set[int] = set()
    stack: list[tuple[Any, bool]] = [(root, False)]
    while stack:
        node, is_counted = stack.pop()
        key = id(node)
        if key in sizes:
            continue
        children = _children(node)
        if not is_counted and children:
            if key in active:
                raise ConfigError(
                    f"{name}:{node.start_mark.line + 1}: an anchor contains itself; remove its alias"
                )
            active.add(key)
            stack.append((node, True))
            for child in children:
                if id(child) in active:
                    raise ConfigError(
                        f"{name}:{child.start_mark.line + 1}: an anchor contains itself; remove its alias"
                    )
                stack.append((child, False))
            continue
        active.discard(key)
        parts = [sizes[id(child)] for child in children]
        nodes = 1 + sum(part[0] for part in parts)
        text = (len(node.value) if isinstance(node.value, str) else 0) + sum(part[1] for part in parts)
        depth = 1 + max((part[2] for part in parts), default=0)
        where = f"{name}:{node.start_mark.line + 1}"
        if depth > MOST_DEPTH:
            raise too_deep(where)
        if nodes > MOST_NODES or text > MOST_TEXT:
            raise too_large(where)
        sizes[key] = (nodes, text, depth)


def _children(node: Any) -> list[Any]:
    if isinstance(node.value, str):
        return []
    items: list[Any] = node.value  # of a mapping pairs of nodes, of a list nodes
    found: list[Any] = []
    for item in items:
        found += item if isinstance(item, tuple) else [item]
    return found
