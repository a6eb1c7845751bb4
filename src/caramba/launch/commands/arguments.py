"""The argument parser of commands: bad arguments raise a ConfigError."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Callable
from typing import NoReturn

from caramba.errors import ConfigError
from caramba.launch.commands.table import COMMANDS


def real(is_good: Callable[[float], bool], problem: str) -> Callable[[str], float]:
    """Return the type of an argument that is a finite number; `problem` is the error for another {text}."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            value = float(text)
            if math.isfinite(value) and is_good(value):
                return value
        raise argparse.ArgumentTypeError(problem.format(text=text))

    return read


class HelpArguments(argparse.ArgumentParser):
    """argparse whose errors end with where help is."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}; see {self.prog} --help")


class CommandArguments(argparse.ArgumentParser):
    """argparse without abbreviations, whose errors end with the usage of the table; adds --quiet and --debug."""

    def __init__(self, command: str) -> None:
        super().__init__(prog=f"caramba {command}", add_help=False, allow_abbrev=False)
        self.command = command
        self.add_argument("--quiet", action="store_true")
        self.add_argument("--debug", action="store_true")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.command}: {message}; usage: caramba {self.command} {COMMANDS[self.command].usage}")
