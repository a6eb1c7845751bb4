"""The arguments of a command, whose mistakes are errors like all others."""

from __future__ import annotations

import argparse
from typing import NoReturn

from caramba.errors import ConfigError


class Arguments(argparse.ArgumentParser):
    """argparse without abbreviations and without an ending of its own; every command takes --quiet and --debug."""

    def __init__(self, command: str, usage: str) -> None:
        super().__init__(prog=f"caramba {command}", add_help=False, allow_abbrev=False)
        self.command, self.form = command, usage
        self.add_argument("--quiet", action="store_true")
        self.add_argument("--debug", action="store_true")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.command}: {message}; usage: caramba {self.command} {self.form}")
