"""The config files of a launch: groups, their options, and the file and line that set a value."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path as File
from typing import Any

from caramba.config.resolve import load_nodes
from caramba.config.source import Path


def conf_root() -> File:
    """Return the folder of the groups that come with caramba."""
    spec = importlib.util.find_spec("caramba.conf")
    assert spec is not None
    assert spec.submodule_search_locations
    return File(next(iter(spec.submodule_search_locations)))


def groups(config_dirs: Iterable[File] = ()) -> dict[str, dict[str, File]]:
    """Return every group with its options, as {group: {option: file}}, caramba's own before a user's."""
    found: dict[str, dict[str, File]] = {}
    for root in (conf_root(), *config_dirs):
        for file in sorted(root.rglob("*.yaml")):
            relative = file.relative_to(root)
            if len(relative.parts) > 1:
                found.setdefault(relative.parent.as_posix(), {}).setdefault(file.stem, file)
    return found


def description(file: File) -> str:
    """Return the first comment line of a YAML file (after a `# @package` line), which describes the option."""
    with open(file, encoding="utf-8") as lines:
        for line in lines:
            text = line.strip()
            if text and not text.startswith("#"):
                break
            words = text.removeprefix("#").strip()
            if words and not words.startswith("@"):
                return words.rstrip(".")
    return ""


def config_file(config_path: str, config_dirs: Iterable[File] = ()) -> File | None:
    """Return the file that Hydra reads for `config_path`, such as `model/tiny`: the first on the search path."""
    for root in (conf_root(), *config_dirs):
        file = root / f"{config_path}.yaml"
        if file.is_file():
            return file
    return None


def show_file(file: File) -> str:
    """Name a file for a person: `conf/…` for caramba's own, relative to the current folder where possible."""
    root = conf_root()
    if file.is_relative_to(root):
        return f"conf/{file.relative_to(root).as_posix()}"
    here = File.cwd()
    return str(file.relative_to(here) if file.is_relative_to(here) else file)


@dataclass(frozen=True)
class MergedFile:
    """One file of a composition and the package at which its content was merged."""

    file: File
    package: Path


@dataclass(frozen=True)
class SetPath:
    """One override of the command line: the path it set, under canonical names, and its text as typed."""

    path: Path
    text: str


class Origin:
    """Finds the place of a path: command line first, then the layers from the last merged to the first.

    Hydra merges without keeping track, so this walks each file's YAML nodes, which carry their lines. The deepest
    match wins, and among equals the layer that was merged last, since its value is the one that counts.
    """

    def __init__(self, layers: Callable[[], list[MergedFile]], given: list[SetPath]) -> None:
        self._read_layers = layers
        self.given = given

    @cached_property
    def layers(self) -> list[tuple[MergedFile, Any]]:
        # By the parser that read the file, which takes texts that PyYAML's own refuses.
        return [
            (layer, load_nodes(layer.file.read_text("utf-8"), show_file(layer.file))) for layer in self._read_layers()
        ]

    def place(self, path: Path) -> str:
        """Return where the value at `path` was written, or an empty string.

        A missing key of a single-file manifest gets the file alone.
        """
        for given in reversed(self.given):
            if path[: len(given.path)] == given.path:
                return f"command line: {_without_keys(given.text)}"
        below = [given.text for given in self.given if path and given.path[: len(path)] == path]
        if below:
            return f"command line: {_without_keys(' '.join(below[:2]))}"
        best: tuple[int, str] = (0, "")
        for layer, node in reversed(self.layers):
            depth, line = _match(node, layer.package, path)
            if depth > best[0]:
                best = (depth, f"{show_file(layer.file)}:{line}")
        if not best[1] and len(self.layers) == 1:
            return show_file(self.layers[0][0].file)  # a single-file manifest: what is missing belongs there
        return best[1]


def _without_keys(text: str) -> str:
    """Return an override without the value of `key_env`, which may be a key that was typed in place of a name."""
    return re.sub(r"(key_env\s*[:=]\s*)[^,}\s]+", r"\1…", text)


def _match(node: Any, package: Path, path: Path) -> tuple[int, int]:
    """Return how many parts of `path` this file covers, and the line of the deepest; (0, 0) when it covers none."""
    import yaml

    if path[: len(package)] != package or node is None:
        return 0, 0
    depth, line = len(package), node.start_mark.line + 1
    matched = bool(package)
    for part in path[len(package) :]:
        child = None
        if isinstance(node, yaml.MappingNode):
            child = next(((key, value) for key, value in node.value if key.value == str(part)), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            child = (node.value[part], node.value[part])
        elif isinstance(node, yaml.ScalarNode) and "${" in node.value:
            return len(path), line  # the rest of the path is behind this reference
        if child is None:
            break
        depth, line, node, matched = depth + 1, child[0].start_mark.line + 1, child[1], True
    return (depth, line) if matched else (0, 0)
