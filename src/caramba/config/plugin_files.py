"""The source of a plugin: its module, the modules that its targets are in, and what these import from its folder."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from caramba.config.node import NodeConfig
from caramba.config.plugin_import import root_of
from caramba.config.plugin_types import schemas_of

COMPILED = (".so", ".pyd", ".pyc")  # the last without a source next to it


@dataclass(frozen=True)
class PluginSource:
    """What a plugin is made of: its file, the SHA-256 of each of its source files by path below the folder that holds
    it, and its version where it is an installed distribution."""

    module: str
    file: str
    files: dict[str, str]
    version: str | None = None

    @property
    def identity(self) -> str:
        """One SHA-256 of all files, wherever the folder is."""
        text = "".join(f"{digest}  {name}\n" for name, digest in sorted(self.files.items()))
        return hashlib.sha256(text.encode()).hexdigest()


def read_source(name: str) -> PluginSource:
    """Read the source of a plugin that is imported. Nothing is imported for it.

    Modules are followed through their import statements, at any depth of them, if they are next to the plugin:
    in the same folder, or, of an installed one, in the same package.
    """
    module = sys.modules[name]
    root = root_of(module, keeps_installed=True)
    file = str(getattr(module, "__file__", ""))
    if root is None and not file:
        return PluginSource(name, file, {})
    is_installed = root_of(module) is None
    schemas = [schema for schema in schemas_of(module) if "target" in schema.__dict__]
    begin = [name, *(schema.__module__ for schema in schemas), *_targets(schemas)]
    tops = {item.partition(".")[0] for item in begin} if is_installed else None
    files = {
        where: hashlib.sha256(path.read_bytes()).hexdigest()
        for where, path in _closure(root, begin, tops).items()
    }
    return PluginSource(name, file, files, _version(name) if is_installed else None)


def _targets(schemas: list[type[NodeConfig]]) -> list[str]:
    return [schema.target.partition(":")[0] for schema in schemas]


def _closure(root: Path | None, begin: list[str], tops: set[str] | None) -> dict[str, Path]:
    """Return the files of modules and of all that they import from their folder, by their path below `root`.

    With `tops` of these packages alone. Paths follow modules if an installation maps these to folders of other names.
    """
    found: dict[str, Path] = {}
    pending = list(begin)
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        top = name.partition(".")[0]
        if name in seen or top == "caramba" or (tops is not None and top not in tops):
            continue
        seen.add(name)
        parts = name.split(".")
        pending.extend(".".join(parts[:depth]) for depth in range(1, len(parts)))  # packages run first
        path = _file(_mapped(parts) if root is None else root.joinpath(*parts))
        if path is None:
            continue
        found["/".join(parts) + _end(path) if root is None else path.relative_to(root).as_posix()] = path
        if path.suffix == ".py":
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            pending.extend(_imports(path, package))
    return found


def _mapped(parts: list[str]) -> Path | None:
    """Return the path of a module by the nearest package above it that is loaded, or by itself; its file may not be."""
    for depth in range(len(parts), 0, -1):
        places = [*getattr(sys.modules.get(".".join(parts[:depth])), "__path__", ())]
        if places:
            return Path(places[0]).joinpath(*parts[depth:])
    file = getattr(sys.modules.get(parts[0]), "__file__", None) if len(parts) == 1 else None
    return None if file is None else Path(file).with_suffix("")


def _end(path: Path) -> str:
    return f"/{path.name}" if path.name == "__init__.py" else path.name[path.name.index(".") :]


def _file(place: Path | None) -> Path | None:
    if place is None:
        return None
    for path in (place / "__init__.py", place.with_name(f"{place.name}.py")):
        if path.is_file():
            return path
    beside = sorted(place.parent.glob(f"{place.name}.*")) if place.parent.is_dir() else []
    return next((path for path in beside if path.suffix in COMPILED), None)


def _imports(path: Path, package: str) -> Iterator[str]:
    """Yield the modules that a file imports, those inside of functions too; a name of one may be a module or not."""
    for node in ast.walk(ast.parse(path.read_bytes(), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (item.name for item in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if package else []
                base = ".".join([*above, *([base] if base else [])])
            if base:
                yield base
                yield from (f"{base}.{item.name}" for item in node.names if item.name != "*")


def _version(name: str) -> str | None:
    owners = importlib.metadata.packages_distributions().get(name.partition(".")[0], [])
    return importlib.metadata.version(owners[0]) if owners else None
