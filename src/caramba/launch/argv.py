"""The thin shim in front of Hydra: reads flags, answers --help at once, and passes the rest to the right place."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from caramba.config.names import nearest
from caramba.errors import ConfigError
from caramba.runs.exit_codes import run_command

FLAGS = (
    "--help",
    "-h",
    "--debug",
    "--quiet",
    "--multirun",
    "-m",
    "--config-dir",
    "-cd",
    "--cfg",
    "-c",
    "--resolve",
    "--version",
)
NATIVE = ("--hydra-help", "--info", "-i", "--shell-completion", "-sc")


@dataclass
class Request:
    """A parsed command line: overrides in order, and the flags."""

    overrides: list[str] = field(default_factory=list)
    config_dirs: list[Path] = field(default_factory=list)
    native: list[str] = field(default_factory=list)
    cfg: str | None = None
    wants_help: bool = False
    wants_version: bool = False
    resolves: bool = False
    is_debug: bool = "--debug" in sys.argv
    is_quiet: bool = False
    is_multirun: bool = False


def parse_argv(argv: list[str]) -> Request:
    """Parse a command line.

    Raises:
        ConfigError: an unknown flag, or one that lacks its value.
    """
    request = Request(is_debug="--debug" in argv)
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, _, value = word.partition("=")
        if not word.startswith("-"):
            request.overrides.append(word)
        elif word == "--version":
            request.wants_version = True
        elif word in ("--help", "-h"):
            request.wants_help = True
        elif name in ("--shell-completion", "-sc", "--hydra-help"):
            request.native.append(word)
        elif name in ("--info", "-i"):
            request.native.append(word)
            if rest and not value and "=" not in rest[0] and not rest[0].startswith("-"):
                request.native.append(rest.pop(0))
        elif name in ("--config-dir", "-cd"):
            request.config_dirs.append(as_folder(value or _next(word, rest)))
        elif name in ("--cfg", "-c"):
            request.cfg = value or _next(word, rest)
        elif word == "--resolve":
            request.resolves = True
        elif word in ("--multirun", "-m"):
            request.is_multirun = True
        elif word == "--quiet":
            request.is_quiet = True
        elif word != "--debug":
            raise ConfigError(f"command line: unknown option {word}{_hint(name, value, rest)} see --help")
    return request


def _hint(flag: str, value: str, rest: list[str]) -> str:
    """Return what was meant by an unknown flag: a key without its dashes, the plan, or the nearest flag."""
    from caramba.config.composition import Composition
    from caramba.launch.groups import groups

    name = flag.lstrip("-").replace("-", "_")
    if name == "print_plan":
        return "; caramba compile prints the plan;"
    if name.split(".")[0] in {"manifest", "resume", *Composition.model_fields, *groups()}:
        given = value or (rest[0] if rest and "=" not in rest[0] and not rest[0].startswith("-") else "VALUE")
        return f"; a key has no dashes: {name}={given};"
    flags = {known.lstrip("-"): known for known in (*FLAGS, *NATIVE)}
    near = nearest(flag.lstrip("-"), flags)
    return near.replace("'", "'--", 1) if near else ";"


def _next(word: str, rest: list[str]) -> str:
    if not rest:
        raise ConfigError(f"command line: {word} needs a value; see --help")
    return rest.pop(0)


def as_folder(text: str) -> Path:
    """Return the folder that `--config-dir` names.

    Raises:
        ConfigError: there is no such folder.
    """
    folder = Path(text).expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(
            f"--config-dir {text}: no such folder; it should hold groups, as in {text}/model/mine.yaml"
        )
    return folder


def main(argv: list[str] | None = None) -> int:
    """Return the exit status: 0, 1 for a failure, 2 for a user's mistake, 130 when interrupted."""
    words = sys.argv[1:] if argv is None else argv
    return run_command(lambda: _dispatch(words), is_debug="--debug" in words)


def _dispatch(argv: list[str]) -> int:
    request = parse_argv(argv)
    if request.wants_version:
        from caramba import __version__

        print(f"caramba {__version__}")
        return 0
    if request.wants_help:
        from caramba.launch.help import help_text

        print(help_text(request.config_dirs))
        return 0
    if request.native:
        from caramba.launch.native import run_native

        return run_native(request)
    if request.cfg is not None:
        from caramba.launch.show import show_config

        return show_config(request)
    if request.is_multirun:
        from caramba.launch.sweep import run_sweep

        return run_sweep(request)
    from caramba.launch.run import launch

    return launch(request)
