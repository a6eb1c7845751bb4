"""The argument parser of commands: bad arguments raise a ConfigError."""

from __future__ import annotations

import argparse
from typing import NoReturn

from caramba.errors import ConfigError
from caramba.launch.commands.table import COMMANDS


class CommandArguments(argparse.ArgumentParser):
    """argparse without abbreviations, whose errors end with the usage of the table; adds --quiet and --debug."""

    def __init__(self, command: str) -> None:
        super().__init__(prog=f"caramba {command}", add_help=False, allow_abbrev=False)
        self.command = command
        self.add_argument("--quiet", action="store_true")
        self.add_argument("--debug", action="store_true")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            f"{self.command}: {message}; usage: caramba {self.command} {COMMANDS[self.command].usage}"
        )
