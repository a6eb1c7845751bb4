"""The command line of a launch: flags, and overrides parsed for Hydra; keys that make Hydra run code are refused."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as File
from typing import TYPE_CHECKING, Any

from caramba.config.resolve import (
    MOST_DEPTH,
    MOST_DIGITS,
    MOST_OPTION_BYTES,
    MOST_OPTION_NODES,
    load_nodes,
    read_text,
    too_deep,
)
from caramba.config.source import Path, is_index
from caramba.errors import SYNONYMS, ConfigError, clip, nearest, one_line, quote
from caramba.launch.config_files import config_file, groups, show_file

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override as HydraOverride

EXECUTABLE = re.compile(r"(?<![A-Za-z0-9_])_(?:target|partial|args|recursive|convert|call)_(?![A-Za-z0-9_])")

# What people reach for among Hydra's own keys and groups, and how the same is had here. The longest name decides.
_LOGS = "settings.instrument=plain and logger=default say what is shown and kept"
_HYDRA_WAYS = {
    "sweeper": "a search needs -m: caramba -m hydra/sweeper=optuna KEY=interval(a,b); its settings, hydra.sweeper.KEY, "
    "go with it",
    "run": "name=NAME sets the folder, runs/NAME/ID",
    "sweep": "name=NAME sets the folder, runs/NAME/sweeps/ID",
    "output": "a run has overrides.txt and manifest.json in place of .hydra/; --cfg job prints the tree",
    "output_subdir": "a run has overrides.txt and manifest.json in place of .hydra/; --cfg job prints the tree",
    "job": "write name=NAME, and set variables before the command",
    "job.chdir": "a run never leaves the folder that it was started in, so paths stay as you write them",
    "job.name": "write name=NAME",
    "job.num": "a sweep numbers its points itself",
    "job.env": "set the variables before the command: NAME=VALUE caramba …",
    "env": "set the variables before the command: NAME=VALUE caramba …",
    "verbose": "--debug shows tracebacks, --quiet results alone",
    "job_logging": _LOGS,
    "hydra_logging": "--quiet and --debug set what is shown",
    "searchpath": "--config-dir DIR adds a folder of groups",
    "callbacks": "callbacks=[{type: NAME}] of a plugin",
    "mode": "-m runs every point",
    "help": "caramba --help and caramba schema",
    "launcher": "it would compose again in every job; launcher=slurm submits arrays (submitit), launcher=process "
    "launcher.n_jobs=N runs points side by side (joblib)",
}
MOST_DEFAULTS = 32  # Hydra merges each, also one named twice, in up to 0.05 s
_NO_WAY = "remove it (--config-dir DIR adds a folder of groups)"


def refuse_unsafe_overrides(words: Iterable[str]) -> None:
    """Check overrides as typed.

    Raises:
        ConfigError: a `_target_` or its kin anywhere in the text, or a key of Hydra's own.
    """
    for word in words:
        found = EXECUTABLE.search(word)
        if found:
            raise ConfigError(
                f"command line: {word}: {found[0]} would run code, and a manifest only names things; "
                "use `type` with a known class"
            )
        key = word.lstrip("+~").split("=", 1)[0]
        if re.split(r"[./@]", key)[0] == "hydra" or "@hydra" in key:
            name = re.sub(r"^hydra[./@]?", "", key)
            named = [start for start in _HYDRA_WAYS if re.match(rf"{re.escape(start)}(?![a-z])", name)]
            way = _HYDRA_WAYS[max(named, key=len)] if named else _NO_WAY
            raise ConfigError(f"command line: {key} belongs to Hydra and is set by caramba; {way}")


def refuse_unsafe_folder(folder: File) -> None:
    """Check every YAML of a user's config folder.

    Raises:
        ConfigError: a key that would run code, one of Hydra's own, an option that caramba's own option would hide,
            or a file that is not YAML.
    """
    import yaml

    for file in sorted((*folder.rglob("*.yaml"), *folder.rglob("*.yml"))):
        relative = file.relative_to(folder)
        name = show_file(file)
        if file.suffix == ".yml":
            raise ConfigError(
                f"{name}: Hydra reads only *.yaml and would ignore this file; rename it to {file.stem}.yaml"
            )
        if relative.parts[0] == "hydra":
            raise ConfigError(f"{name}: groups of Hydra's own are set by caramba; remove the folder hydra/")
        if config_file(relative.with_suffix("").as_posix()) is not None:
            raise ConfigError(f"{name}: caramba has an option of this name, which would hide this file; rename it")
        text = read_text(file, name, MOST_OPTION_BYTES)
        # Line by line: over a whole text, these expressions take time quadratic in its lines.
        lines = [line.strip() for line in text.splitlines()]
        if any(re.match(r"#\s*@package\s+hydra\b", line) for line in lines):
            raise ConfigError(f"{name}: a package of Hydra's own is set by caramba; change the @package line")
        rest = itertools.dropwhile(lambda line: not line or re.match(r"#\s*@", line), lines)
        if any(re.match(r"#\s*@package\b", line) for line in rest):
            raise ConfigError(
                f"{name}: Hydra reads `# @package` only before any other line; move it to the top of the file"
            )
        try:
            tree = load_nodes(text, name, MOST_OPTION_NODES)
        except yaml.YAMLError as error:
            raise ConfigError(f"{name}: not YAML: {one_line(error)}") from None
        _refuse_node(tree, name, at_root=True)


def _refuse_node(node: Any, name: str, *, at_root: bool = False) -> None:
    import yaml

    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_node(item, name)
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        line = key.start_mark.line + 1
        text = str(key.value)
        if EXECUTABLE.fullmatch(text):
            raise ConfigError(f"{name}:{line}: {text} would run code, and a manifest only names things; use `type:`")
        if at_root and text.split(".")[0] == "hydra":
            raise ConfigError(f"{name}:{line}: keys of Hydra's own are set by caramba; remove {text}")
        if at_root and text == "defaults" and re.search(r"\bhydra\b|\$\{", " ".join(_scalars(value, with_keys=True))):
            raise ConfigError(
                f"{name}:{line}: a defaults list may neither set Hydra's own groups nor use ${{…}}; name the option"
            )
        if (
            at_root
            and text == "defaults"
            and (count := sum(1 for _ in _scalars(value, with_keys=False))) > MOST_DEFAULTS
        ):
            raise ConfigError(
                f"{name}:{line}: a defaults list that names {count} options, expected at most {MOST_DEFAULTS}; name "
                "each once"
            )
        _refuse_node(value, name)


def _scalars(node: Any, *, with_keys: bool) -> Iterator[str]:
    """Yield the scalars below a node in order, those of mappings' keys too if asked."""
    if isinstance(node.value, str):
        yield node.value
        return
    for item in node.value:
        pair = item if isinstance(item, tuple) else (item,)
        for child in pair if with_keys else pair[-1:]:
            yield from _scalars(child, with_keys=with_keys)


def refuse_option(group: str, option: str, options: Iterable[str]) -> None:
    """Check that a group has an option.

    Raises:
        ConfigError: with the nearest option and the whole list.
    """
    known = sorted(options)
    if option not in known:
        raise ConfigError(
            f"{group}: no option {option!r}{nearest(option, known) or ';'} options: {', '.join(known)} "
            f"(command line: {group}={option})"
        )


@dataclass(frozen=True)
class Override:
    """One override: as typed, as Hydra gets it, the group it chooses or the paths that it sets."""

    typed: str
    hydra: HydraOverride
    group: str | None = None
    path: Path = ()

    @property
    def text(self) -> str:
        return str(self.hydra.input_line)

    @property
    def options(self) -> tuple[str, ...]:
        """The options of its group that this override chooses."""
        if self.group is None or self.hydra.is_delete():
            return ()
        value = self.hydra.value()
        return tuple(map(str, value)) if isinstance(value, list) else (str(value),)

    @property
    def paths(self) -> Iterator[Path]:
        """Every path that this override sets; a mapping sets the paths of its leaves."""
        if self.group is None and not self.hydra.is_delete():
            yield from _leaves(self.path, self.hydra.value())


def parse_overrides(
    typed: Iterable[str], options: Mapping[str, Mapping[str, File]], defaults: Iterable[str]
) -> list[Override]:
    """Parse overrides.

    A key that names a group chooses an option; any other key becomes `++key=value`, so that an unknown one reaches
    the schema, which knows its nearest name. `layers[0]` is read as `layers.0`.

    Raises:
        ConfigError: a text that is no override, an option that does not exist, or a sweep without --multirun.
    """
    known = set(defaults)
    return [_parse_override(text, options, known) for text in typed]


def _parse_override(typed: str, options: Mapping[str, Mapping[str, File]], defaults: set[str]) -> Override:
    prefix = re.match(r"^(\+\+|\+|~)?", typed)
    sign = prefix[0] if prefix else ""
    key, equals, value = typed[len(sign) :].partition("=")
    if not key or not (equals or sign == "~"):
        raise ConfigError(f"command line: {typed!r} is not an override; write KEY=VALUE or GROUP=OPTION")
    key = re.sub(r"\[(\d+)\]", r".\1", key)
    group = key.partition("@")[0]
    if group in options:
        override = _parse(typed, f"{_group_sign(sign, key, defaults)}{key}{equals}{value}")
        if not override.is_delete() and not override.is_sweep_override():
            chosen = override.value()
            if isinstance(chosen, dict) or "${" in str(chosen):
                raise ConfigError(
                    f"command line: {typed}: {group} is a group, so its value is the name of an option: "
                    f"{', '.join(sorted(options[group]))}; set single keys as {group}.KEY=VALUE"
                )
            for option in chosen if isinstance(chosen, list) else [chosen]:
                if option is None:
                    _refuse_null(typed, group, options[group])
                refuse_option(group, str(option), options[group])
        return Override(typed, override, group=group)
    if "@" in key or "/" in key:
        raise ConfigError(f"command line: {typed}: there is no group {group!r}; groups: {', '.join(sorted(options))}")
    key = _canonical(key)
    override = _parse(typed, f"{'~' if sign == '~' else '++'}{key}{equals}{value}")
    path = tuple(int(part) if is_index(part) else part for part in key.split("."))
    if override.is_delete() and isinstance(path[-1], int):
        whole = ".".join(str(part) for part in path[:-1])
        raise ConfigError(
            f"command line: {typed}: an item of a list cannot be taken out of it; give the list that is to remain, "
            f"{whole}=[...], or an option of your own (--config-dir)"
        )
    return Override(typed, override, path=path)


def _refuse_null(typed: str, group: str, options: Iterable[str]) -> None:
    fix = f"write {group}=none" if "none" in options else f"options: {', '.join(sorted(options))}"
    raise ConfigError(f"command line: {typed}: null is not an option of {group}; {fix}")


def _group_sign(sign: str, key: str, defaults: set[str]) -> str:
    """Options work with and without `+`: a group outside the defaults list is appended, one inside it is replaced."""
    if sign == "~":
        return sign
    return "" if key in defaults else "+"


def _canonical(key: str) -> str:
    """Resolve the aliases of a phase's keys, so that the command line replaces what a preset set under another name."""
    parts = key.split(".")
    if parts[0] == "defaults":
        parts[0] = "settings"
    return ".".join((*parts[:-1], aliases_of(parts)[0]))


def aliases_of(path: Sequence[str | int]) -> tuple[str, ...]:
    """Return the names of the last key of a path: the name in the schema, then its aliases in a phase."""
    last = str(path[-1])
    if "train" not in path[:-1]:
        return (last,)
    from caramba.config.train import PhaseConfig  # pydantic takes longer to load than help to print

    name = PhaseConfig.aliases.get(last, last)
    return (name, *(alias for alias, target in PhaseConfig.aliases.items() if target == name))


def rename_deleted(override: Override, name: str) -> Override:
    """Return an override that deletes a key, `~KEY` or `~KEY=VALUE`, under another of the key's names."""
    path = (*override.path[:-1], name)
    _, equals, value = override.text.partition("=")
    text = f"~{'.'.join(str(part) for part in path)}{equals}{value}"
    return Override(override.typed, _parse(override.typed, text), path=path)


def _parse(typed: str, text: str) -> HydraOverride:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(text)
        if not override.is_sweep_override():
            _refuse_unbounded(override.value(), override.key_or_group)
        return override
    except RecursionError:
        raise too_deep(f"command line: {typed[:100]!r}") from None
    except ConfigError:
        raise
    except (HydraException, ValueError) as error:  # of Python, for a number of too many digits
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"command line: cannot read {quote(typed)}: {clip(reason, 200)}; quote values with special characters, as "
            "in 'key=\"a, b\"'"
        ) from None


def _refuse_unbounded(value: Any, key: str) -> None:
    """Check a value of an override as `load_nodes` does one of a file: OmegaConf fails at either in its own words."""
    level, depth = [value], 0
    while level:
        if (depth := depth + 1) > MOST_DEPTH:
            raise too_deep(f"command line: {key}")
        if any(type(item) is int and abs(item) >= 10**MOST_DIGITS for item in level):
            raise ConfigError(f"command line: {key}: a whole number of more than {MOST_DIGITS} digits; write fewer")
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]


def refuse_sweeps(overrides: Iterable[Override]) -> None:
    """Raise when an override holds several values and --multirun was not given."""
    for override in overrides:
        if override.hydra.is_sweep_override():
            raise ConfigError(
                f"command line: {override.typed} holds several values; add --multirun to run each, or "
                "write a list as [a,b]"
            )


def _leaves(path: Path, value: Any) -> Iterator[Path]:
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves((*path, str(key)), item)


def expand_sweep(overrides: list[str], config_dirs: Sequence[File] = ()) -> list[list[str]]:
    """Expand `a=1,2`, `choice(…)`, `range(…)` and `glob(…)` into one list of overrides per combination.

    Raises:
        ConfigError: a text that Hydra cannot read, an interval, which has no finite set of values, or a glob that
            matches nothing.
    """
    refuse_unsafe_overrides(overrides)
    axes: list[list[str]] = []
    for word in overrides:
        sign, override = split_sign(word)
        if sign == "~" or not override.is_sweep_override():
            axes.append([word])
            continue
        if override.is_interval_sweep():
            raise ConfigError(
                f"command line: {word}: an interval has no finite set of values; use choice(…) or range(…), or "
                "let hydra/sweeper=optuna draw from it"
            )
        key = word[len(sign) :].partition("=")[0]
        values = _values(override, key, config_dirs)
        if not values:
            raise ConfigError(f"command line: {word}: matches no option of {key}")
        axes.append([f"{sign}{key}={value}" for value in values])
    return [list(point) for point in itertools.product(*axes)]


def split_sign(word: str) -> tuple[str, HydraOverride]:
    """Return the sign of an override (`+`, `++`, `~` or none), and what Hydra reads in the rest."""
    sign = "" if word[:1].isalnum() else word[: len(word) - len(word.lstrip("+~"))]
    body = word[len(sign) :]
    return sign, _parse(word, body if "=" in body else f"{body}=null")


def _values(override: HydraOverride, key: str, config_dirs: Sequence[File]) -> list[str]:
    from hydra.core.override_parser.types import Glob

    value = override.value()
    if isinstance(value, Glob):
        return value.filter(sorted(groups(config_dirs).get(key, {})))
    return list(override.sweep_string_iterator())


_SWITCHES = {
    **dict.fromkeys(("--help", "-h"), "wants_help"),
    **dict.fromkeys(("--multirun", "-m"), "is_multirun"),
    **{"--debug": "is_debug", "--quiet": "is_quiet", "--resolve": "resolves", "--version": "wants_version"},
}
"""Flags without a value, and the fields that they set."""
FLAGS = (*_SWITCHES, "--config-dir", "-cd", "--cfg", "-c", "--package", "-p")
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
    config_dirs: list[File] = field(default_factory=list)
    native: list[str] = field(default_factory=list)
    cfg: str | None = None
    package: str | None = None
    wants_help: bool = False
    wants_version: bool = False
    resolves: bool = False
    is_debug: bool = False
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
    args = CommandLine()
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, _, value = word.partition("=")
        if not word.startswith("-"):
            args.overrides.append(word)
        elif word in _SWITCHES:
            setattr(args, _SWITCHES[word], True)
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
        else:
            raise ConfigError(f"command line: unknown option {word}{_hint(name, value, rest)} see --help")
    if args.package is not None and args.cfg is None:
        raise ConfigError("command line: --package prints a part of --cfg job; write --cfg job --package train")
    return args


def _hint(flag: str, value: str, rest: list[str]) -> str:
    """Return what was meant by an unknown flag: a key without its dashes, the plan, or the nearest flag."""
    from caramba.config.composition import Composition, place_of

    name = flag.lstrip("-").replace("-", "_")
    if name == "print_plan":
        return "; caramba compile prints the plan;"
    if flag in HYDRA_FLAGS:
        return f": {HYDRA_FLAGS[flag]};"
    top = name.split(".")[0]
    known = {"manifest", "resume", *Composition.model_fields, *groups()}
    place = name if top in known else place_of(name) or (SYNONYMS.get(name) if SYNONYMS.get(name) in known else None)
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


def as_folder(text: str) -> File:
    """Return the folder that `--config-dir` names.

    Raises:
        ConfigError: there is no such folder.
    """
    folder = File(text).expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(f"--config-dir {text}: no such folder; it should hold groups, as in {text}/model/mine.yaml")
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
        raise ConfigError(f"command line: {', '.join(NATIVE)}, --multirun and --cfg belong to `caramba launch`")
    return args


def split_files(args: CommandLine) -> tuple[list[str], list[str]]:
    """Return the manifest files among the overrides, and the others.

    Raises:
        ConfigError: a word that is neither an override nor a file.
    """
    files = [word for word in args.overrides if "=" not in word and not word.startswith("~")]
    for file in files:
        if File(file).is_dir():
            held = "its manifest.json" if (File(file) / "manifest.json").is_file() else "a file"
            raise ConfigError(f"{file} is a folder; give {held}")
        if not File(file).is_file():
            raise ConfigError(f"{file}: no such file, and not an override (KEY=VALUE)")
    return files, [word for word in args.overrides if word not in files]


def refuse_arguments(command: str, argv: list[str]) -> None:
    """Raise when a command that takes no arguments gets some."""
    extra = [word for word in argv if word not in ("--debug", "--quiet")]
    if extra:
        from caramba.launch.commands.table import COMMANDS

        usage = f"caramba {command} {COMMANDS[command].usage}".rstrip()
        raise ConfigError(f"{command}: unexpected {' '.join(extra)}; usage: {usage}")
