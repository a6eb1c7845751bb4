"""The command line of a launch as flags and overrides, before Hydra reads the overrides."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from caramba.errors import SYNONYMS, ConfigError, nearest

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
    "--package",
    "-p",
    "--resolve",
    "--version",
)
HYDRA_FLAGS = {
    "--config-name": "conf/config.yaml is what is composed; add --config-dir DIR and choose experiment=NAME, or run "
    "one file: caramba run FILE",
    "-cn": "add --config-dir DIR and choose experiment=NAME, or run one file: caramba run FILE",
    "--config-path": "--config-dir DIR adds a folder of groups",
    "-cp": "--config-dir DIR adds a folder of groups",
    "--run": "a launch runs; leave it out",
    "-r": "a launch runs; leave it out",
    "--experimental-rerun": "caramba rerun RUN",
}
"""Flags of Hydra that are not taken, and what does the same."""
NATIVE = ("--hydra-help", "--info", "-i", "--shell-completion", "-sc")


@dataclass
class CommandLine:
    """A parsed command line: overrides in order, and the flags."""

    overrides: list[str] = field(default_factory=list)
    config_dirs: list[Path] = field(default_factory=list)
    native: list[str] = field(default_factory=list)
    cfg: str | None = None
    package: str | None = None
    wants_help: bool = False
    wants_version: bool = False
    resolves: bool = False
    is_debug: bool = "--debug" in sys.argv
    is_quiet: bool = False
    is_multirun: bool = False

    @property
    def worker_flags(self) -> list[str]:
        """The flags that a worker gets."""
        return [flag for flag, is_set in (("--debug", self.is_debug), ("--quiet", self.is_quiet)) if is_set]


def parse_argv(argv: list[str]) -> CommandLine:
    """Parse a command line.

    Raises:
        ConfigError: an unknown flag, or one that lacks its value.
    """
    args = CommandLine(is_debug="--debug" in argv)
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, _, value = word.partition("=")
        if not word.startswith("-"):
            args.overrides.append(word)
        elif word == "--version":
            args.wants_version = True
        elif word in ("--help", "-h"):
            args.wants_help = True
        elif name in ("--shell-completion", "-sc", "--hydra-help"):
            args.native.append(word)
        elif name in ("--info", "-i"):
            args.native.append(word)
            if rest and not value and "=" not in rest[0] and not rest[0].startswith("-"):
                args.native.append(rest.pop(0))
        elif name in ("--config-dir", "-cd"):
            args.config_dirs.append(as_folder(value or _next(word, rest)))
        elif name in ("--cfg", "-c"):
            args.cfg = value or _next(word, rest)
        elif name in ("--package", "-p"):
            args.package = value or _next(word, rest)
        elif word == "--resolve":
            args.resolves = True
        elif word in ("--multirun", "-m"):
            args.is_multirun = True
        elif word == "--quiet":
            args.is_quiet = True
        elif word != "--debug":
            raise ConfigError(f"command line: unknown option {word}{_hint(name, value, rest)} see --help")
    if args.package is not None and args.cfg is None:
        raise ConfigError(
            "command line: --package prints a part of --cfg job; write --cfg job --package train"
        )
    return args


def _hint(flag: str, value: str, rest: list[str]) -> str:
    """Return what was meant by an unknown flag: a key without its dashes, the plan, or the nearest flag."""
    from caramba.config.composition import Composition, place_of
    from caramba.launch.config_files import groups

    name = flag.lstrip("-").replace("-", "_")
    if name == "print_plan":
        return "; caramba compile prints the plan;"
    if flag in HYDRA_FLAGS:
        return f": {HYDRA_FLAGS[flag]};"
    top = name.split(".")[0]
    known = {"manifest", "resume", *Composition.model_fields, *groups()}
    place = (
        name
        if top in known
        else place_of(name) or (SYNONYMS.get(name) if SYNONYMS.get(name) in known else None)
    )
    if place is not None:
        name = place
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


def parse_command(argv: list[str], value_flags: tuple[str, ...] = ()) -> CommandLine:
    """Parse the words of another command than launch; `--group NAME` becomes the override `group=NAME`."""
    words: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag in value_flags:
            if not equals and not rest:
                raise ConfigError(f"command line: {flag} needs a value")
            words.append(f"{flag.lstrip('-')}={value if equals else rest.pop(0)}")
        else:
            words.append(word)
    args = parse_argv(words)
    if args.native or args.is_multirun or args.cfg:
        raise ConfigError(
            f"command line: {', '.join(NATIVE)}, --multirun and --cfg belong to `caramba launch`"
        )
    return args


def split_files(args: CommandLine) -> tuple[list[str], list[str]]:
    """Return the manifest files among the overrides, and the others.

    Raises:
        ConfigError: a word that is neither an override nor a file.
    """
    files = [word for word in args.overrides if "=" not in word and not word.startswith("~")]
    for file in files:
        if Path(file).is_dir():
            held = "its manifest.json" if (Path(file) / "manifest.json").is_file() else "a file"
            raise ConfigError(f"{file} is a folder; give {held}")
        if not Path(file).is_file():
            raise ConfigError(f"{file}: no such file, and not an override (KEY=VALUE)")
    return files, [word for word in args.overrides if word not in files]


def refuse_arguments(command: str, argv: list[str]) -> None:
    """Raise when a command that takes no arguments gets some."""
    extra = [word for word in argv if word not in ("--debug", "--quiet")]
    if extra:
        from caramba.launch.commands.table import COMMANDS

        usage = f"caramba {command} {COMMANDS[command].usage}".rstrip()
        raise ConfigError(f"{command}: unexpected {' '.join(extra)}; usage: {usage}")
