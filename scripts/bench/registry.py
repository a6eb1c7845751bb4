"""The cases: one module a case in cases/, found by name.

A case has `add_options(parser)` and `run(options, record)`, which measures and calls `record.write`.
`OUT = None` means no file by default. `SMOKE_OPTIONS` make it run in seconds on a CPU; a test runs those.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from record import DEFAULT_FOLDER

CASES = Path(__file__).with_name("cases")


class UsageError(Exception):
    """A mistake in the options; ends the process with status 2."""


@dataclass(frozen=True)
class Case:
    name: str
    module: ModuleType

    @property
    def summary(self) -> str:
        return (self.module.__doc__ or "").strip().splitlines()[0]

    @property
    def smoke(self) -> tuple[str, ...] | None:
        """Options of a run of seconds on a CPU; None if the case needs devices, data or other packages."""
        return getattr(self.module, "SMOKE_OPTIONS", None)

    def add_out(self, parser: argparse.ArgumentParser) -> None:
        default = getattr(self.module, "OUT", DEFAULT_FOLDER / f"{self.name}.json")
        parser.add_argument("--out", type=Path, default=default, help="the JSON file (default: %(default)s)")


def case_names() -> list[str]:
    """Return the modules of cases/ that define `run`; the others are parts that cases share."""
    return sorted(file.stem for file in CASES.glob("*.py") if _defines_run(file))


def _defines_run(file: Path) -> bool:
    tree = ast.parse(file.read_text())
    return any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body)


def load_case(name: str) -> Case:
    """Import a case.

    Raises:
        UsageError: No case has this name.
    """
    names = case_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"run.py: unknown case {name!r}{hint} List them: python scripts/bench/run.py --list")
    return Case(name, importlib.import_module(f"cases.{name}"))
