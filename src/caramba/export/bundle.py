"""One Python file out of many: the definitions that a class needs, taken from their modules' source.

Only what can run is taken. Names that stand in annotations alone (schema classes, mostly) become `Any`, which is why
the schema and pydantic stay behind.
"""

import ast
import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from caramba.errors import ConfigError

PACKAGE = "caramba"
Place = tuple[str, str]
"""Module and top-level name of a definition."""
REGISTRATION = "caramba_op"
"""The decorator that registers an op. It is left out: a bundle has the reference, and the op may exist already."""


@dataclass
class ModuleSource:
    """A module's text and its top-level statements by the names that they bind."""

    module: str
    text: str
    definitions: dict[str, ast.stmt] = field(default_factory=dict)
    imports: dict[str, tuple[ast.Import | ast.ImportFrom, ast.alias]] = field(default_factory=dict)

    @classmethod
    def read(cls, module: str) -> "ModuleSource":
        """Parse a module without running it.

        Raises:
            ConfigError: the module has no Python source.
        """
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            raise ConfigError(f"export: module {module} has no Python source to bundle")
        source = cls(module, Path(spec.origin).read_text(encoding="utf-8"))
        for statement in ast.parse(source.text).body:
            _drop_registration(statement)
            source._bind(statement)
        return source

    def _bind(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                self.imports[alias.asname or alias.name.split(".")[0]] = (statement, alias)
        elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
            self.definitions[statement.name] = statement
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                for node in ast.walk(target):
                    if isinstance(node, ast.Name):
                        self.definitions[node.id] = statement
        elif isinstance(statement, ast.If):  # `if TYPE_CHECKING:` of a lazy package
            for inner in statement.body:
                self._bind(inner)

    @cached_property
    def _lines(self) -> list[str]:
        return self.text.splitlines(keepends=True)

    def segment(self, statement: ast.stmt) -> str:
        """Return a statement's text, decorators included, imports of this package inside it taken out."""
        decorators = getattr(statement, "decorator_list", [])
        first = min([statement.lineno, *(item.lineno for item in decorators)])
        assert statement.end_lineno is not None
        lines = self._lines[first - 1 : statement.end_lineno]
        for node in ast.walk(statement):
            if isinstance(node, ast.ImportFrom) and _is_ours(node.module):
                assert node.end_lineno is not None
                start = node.lineno - first
                lines[start : node.end_lineno - first + 1] = [" " * node.col_offset + "pass\n"] + ["\n"] * (
                    node.end_lineno - node.lineno
                )
        return "".join(lines).rstrip() + "\n"


class _Names(ast.NodeVisitor):
    """The names that a statement reads: at definition (`early`), when called (`late`), or in annotations only."""

    def __init__(self) -> None:
        self.early: list[str] = []
        self.late: list[str] = []
        self.annotated: list[str] = []
        self.local_imports: list[tuple[ast.ImportFrom, ast.alias]] = []
        self._into = self.early

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):  # a name that is bound here, such as `_`, is another's elsewhere
            self._into.append(node.id)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if _is_ours(node.module):
            self.local_imports.extend((node, alias) for alias in node.names)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._annotation(node.annotation)
        self.visit(node.target)
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = node.args
        for item in [*node.decorator_list, *arguments.defaults, *filter(None, arguments.kw_defaults)]:
            self.visit(item)
        every = [
            *arguments.posonlyargs,
            *arguments.args,
            *arguments.kwonlyargs,
            arguments.vararg,
            arguments.kwarg,
        ]
        for argument in every:
            if argument is not None and argument.annotation is not None:
                self._annotation(argument.annotation)
        if node.returns is not None:
            self._annotation(node.returns)
        before, self._into = self._into, self.late
        for statement in node.body:
            self.visit(statement)
        self._into = before

    def _annotation(self, node: ast.expr) -> None:
        before, self._into = self._into, self.annotated
        self.visit(node)
        self._into = before


class Bundle:
    """Collects definitions, each once, those that another needs at definition before it."""

    def __init__(self, here: dict[str, str]) -> None:
        """`here` maps modules that stay files of their own to the names that the bundle imports them by."""
        self._here = here
        self._sources: dict[str, ModuleSource] = {}
        self._given: dict[Place, tuple[str, tuple[Place, ...]]] = {}
        self._moved: dict[Place, Place] = {}
        self._names: dict[Place, str] = {}
        self._taken: set[str] = set()
        self._imports: dict[str, str] = {}
        self._untyped: set[str] = set()
        self._text: list[str] = []
        self._late: list[Place] = []
        self._begun: set[Place] = set()

    def give(self, place: Place, text: str, needs: Iterable[Place] = ()) -> None:
        """Define a name by this text instead of its module's; `needs` come before it."""
        self._given[place] = (text, tuple(needs))

    def move(self, place: Place, to: Place) -> None:
        """Take another definition wherever `place` is asked for."""
        self._moved[place] = to

    def add(self, place: Place) -> None:
        """Take a definition and everything that it needs."""
        self._require(place)
        while self._late:
            self._require(self._late.pop(0))

    def render(self, docstring: str) -> str:
        """Return the file."""
        untyped = sorted(self._untyped - self._taken - set(self._imports))
        aliases = [f"{name} = Any  # described by plain data here" for name in untyped]
        if aliases:
            self._imports.setdefault("Any", "from typing import Any")
        parts = [
            f'"""{docstring}"""\n\nfrom __future__ import annotations\n',
            "\n".join(sorted(set(self._imports.values()))) + "\n",
            *(["\n".join(aliases) + "\n"] if aliases else []),
            *self._text,
        ]
        return "\n\n".join(part.rstrip("\n") + "\n" for part in parts)

    def _require(self, place: Place) -> str:
        """Emit a definition unless that has begun, and return its name in the bundle."""
        place = self._home(place)
        chosen = self._name_of(place)
        if place in self._begun:
            return chosen
        self._begun.add(place)
        module, name = place
        if place in self._given:
            text, needs = self._given[place]
            for need in needs:
                self._require(need)
            self._text.append(text)
            return chosen
        source = self._source(module)
        statement = source.definitions.get(name)
        if statement is None:
            raise ConfigError(f"export: {module} does not define {name}, which the model's code needs")
        self._emit(source, statement, {name: chosen})
        return chosen

    def _emit(self, source: ModuleSource, statement: ast.stmt, renames: dict[str, str]) -> None:
        names = _Names()
        names.visit(statement)
        for node, alias in names.local_imports:
            assert node.module is not None
            renames[alias.asname or alias.name] = self._later((node.module, alias.name))
        for name in names.early:
            place = self._resolve(source, name)
            if place is not None:
                renames[name] = self._require(place)
        for name in names.late:
            place = self._resolve(source, name)
            if place is not None:
                renames[name] = self._later(place)
        for name in names.annotated:
            if name in source.imports and not self._is_internal(source, name):
                self._resolve(source, name)
            elif name in source.imports or name in source.definitions:
                self._untyped.add(name)
        text = source.segment(statement)
        for old, new in renames.items():
            if old != new:
                text = re.sub(rf"(?<![.\w]){re.escape(old)}(?!\w)", new, text)
        self._text.append(text)

    def _later(self, place: Place) -> str:
        """Name a definition that is only called, and emit it after the one that calls it."""
        place = self._home(place)
        if place not in self._begun:
            self._late.append(place)
        return self._name_of(place)

    def _resolve(self, source: ModuleSource, name: str) -> Place | None:
        """Say where a name of a module is defined; note the import of a foreign one; None for a builtin or local."""
        if name in source.definitions or (source.module, name) in self._given:
            return (source.module, name)
        if name not in source.imports:
            return None
        if self._is_internal(source, name):
            statement, alias = source.imports[name]
            assert isinstance(statement, ast.ImportFrom)
            assert statement.module is not None
            if statement.module in self._here:
                self._imports[name] = f"from {self._here[statement.module]} import {alias.name}"
                return None
            return self._home((statement.module, alias.name))
        self._imports[name] = _import_text(*source.imports[name])
        return None

    def _is_internal(self, source: ModuleSource, name: str) -> bool:
        statement, _ = source.imports[name]
        return isinstance(statement, ast.ImportFrom) and _is_ours(statement.module)

    def _home(self, place: Place) -> Place:
        """Follow re-exports to the module that defines a name, and what was moved to its replacement."""
        while True:
            place = self._moved.get(place, place)
            module, name = place
            if place in self._given:
                return place
            source = self._source(module)
            if name in source.definitions or name not in source.imports:
                return place
            statement, alias = source.imports[name]
            if not isinstance(statement, ast.ImportFrom) or statement.module is None:
                return place
            place = (statement.module, alias.name)

    def _name_of(self, place: Place) -> str:
        if place not in self._names:
            module, name = place
            chosen = name
            for prefix in (module.rsplit(".", 1)[-1], module.replace(".", "_")):
                if chosen in self._taken:
                    chosen = f"_{prefix}_{name.lstrip('_')}"
            self._taken.add(chosen)
            self._names[place] = chosen
        return self._names[place]

    def _source(self, module: str) -> ModuleSource:
        if module not in self._sources:
            self._sources[module] = ModuleSource.read(module)
        return self._sources[module]


def _drop_registration(statement: ast.stmt) -> None:
    if isinstance(statement, ast.FunctionDef):
        statement.decorator_list = [
            item
            for item in statement.decorator_list
            if not (isinstance(item, ast.Call) and isinstance(item.func, ast.Name) and item.func.id == REGISTRATION)
        ]


def _is_ours(module: str | None) -> bool:
    return module is not None and (module == PACKAGE or module.startswith(f"{PACKAGE}."))


def _import_text(statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    renamed = f" as {alias.asname}" if alias.asname else ""
    if isinstance(statement, ast.Import):
        return f"import {alias.name}{renamed}"
    return f"from {statement.module} import {alias.name}{renamed}"
