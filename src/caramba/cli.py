"""The `caramba` command: a small dispatcher that imports what a command needs when it is called."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import sys

from caramba import __version__
from caramba.errors import ConfigError
from caramba.launch.commands.help import command_help
from caramba.launch.commands.table import COMMANDS, OTHER_NAMES
from caramba.runs.exit_codes import imports_without_gc, run_command


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status: 0, 1 for a failure, 2 for a user's mistake, 130 when interrupted."""
    words = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        # A terminal or pipe that has no sign for what a model writes gets its number, and no traceback in mid-answer.
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    return run_command(lambda: _dispatch(words), is_debug="--debug" in words)


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("--help", "-h", "help"):
        return _run("launch", ["--help"])
    if argv[0] == "--version":
        print(f"caramba {__version__}")
        return 0
    command, rest = argv[0], argv[1:]
    if "=" in command or command.startswith(("-", "+", "~")):
        return _run("launch", argv)
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, [*COMMANDS, *OTHER_NAMES], n=1, cutoff=0.5)
        hint = f"; did you mean {OTHER_NAMES.get(near[0], near[0])!r}?" if near else ";"
        raise ConfigError(f"caramba: unknown command {command!r}{hint} commands: {', '.join(COMMANDS)}")
    if command != "launch" and ("--help" in rest or "-h" in rest):
        print(command_help(command))
        return 0
    return _run(command, rest)


def _run(name: str, argv: list[str]) -> int:
    command = COMMANDS[name]
    with imports_without_gc() if command.loads_torch else contextlib.nullcontext():
        module = importlib.import_module(f"caramba.launch.commands.{command.module or name}")
    return module.main(argv)


if __name__ == "__main__":
    sys.exit(main())
