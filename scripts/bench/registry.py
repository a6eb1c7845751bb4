"""The cases: one module a case in cases/, found by name.

A case has `run(options, record)` and `OPTIONS`, a line of its options with their defaults: `--size=1b|tiny` is one of
a list, `--rows=1,2,4` a list with commas, `--only=*` a list with spaces, `--text=` has no default, `--again` is a flag,
and a word without dashes is positional (`overrides*` any number). All have `--device` and `--out`; `OUT = None` means
no file by default. `SMOKE_OPTIONS` make it run in seconds on a CPU; a test runs those.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
from collections.abc import Collection
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
        found = getattr(self.module, "SMOKE_OPTIONS", None)
        return None if found is None else tuple(found.split())

    def parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=f"run.py {self.name}",
            description=self.module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for word in self.module.OPTIONS.split():
            add_option(parser, word)
        parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
        default = getattr(self.module, "OUT", DEFAULT_FOLDER / f"{self.name}.json")
        parser.add_argument("--out", type=Path, default=default, help="the JSON file (default: %(default)s)")
        return parser


def add_option(parser: argparse.ArgumentParser, word: str) -> None:
    """Add one option as `OPTIONS` writes it."""
    name, equals, given = word.partition("=")
    about = f"default: {given}" if given else None
    if not name.startswith("--"):
        parser.add_argument(name.removesuffix("*"), nargs="*" if name.endswith("*") else None)
    elif not equals:
        parser.add_argument(name, action="store_true")
    elif given == "*":
        parser.add_argument(name, nargs="*", default=[])
    elif "|" in given:
        choices = given.split("|")
        parser.add_argument(name, choices=choices, default=choices[0], help=about)
    else:
        kind = items if "," in given else type(literal(given))
        parser.add_argument(name, type=kind, default=given or None, help=about)


def literal(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def items(text: str) -> list[int | float | str]:
    """Return the parts of a list with commas."""
    return [literal(part) for part in text.split(",") if part]


def check_names(option: str, names: Collection[str], known: Collection[str]) -> None:
    """Refuse names that an option does not know.

    Raises:
        UsageError: With the names and what was expected.
    """
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"{option} {','.join(unknown)}: expected some of {', '.join(sorted(known))}")


def case_names() -> list[str]:
    return sorted(file.stem for file in CASES.glob("*.py"))


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
