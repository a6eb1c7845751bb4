"""Refusal, before composing, of keys that would make Hydra run code: in overrides and in user folders."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from caramba.config.names import nearest
from caramba.config.resolve import MOST_OPTION_NODES, load_nodes
from caramba.errors import ConfigError
from caramba.launch.config_files import config_file, show_file

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


def refuse_unsafe_folder(folder: Path) -> None:
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
            raise ConfigError(
                f"{name}: caramba has an option of this name, which would hide this file; rename it"
            )
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{name}: not UTF-8 text (byte {error.start + 1}); save it as UTF-8") from None
        if re.search(r"^\s*#\s*@package\s+hydra\b", text, re.MULTILINE):
            raise ConfigError(f"{name}: a package of Hydra's own is set by caramba; change the @package line")
        late = re.search(r"^(?!\s*#\s*@|\s*$).*\n(?:.*\n)*?\s*#\s*@package\b", text, re.MULTILINE)
        if late:
            raise ConfigError(
                f"{name}: Hydra reads `# @package` only before any other line; move it to the top of the file"
            )
        try:
            tree = load_nodes(text, name, MOST_OPTION_NODES)
        except yaml.YAMLError as error:
            raise ConfigError(f"{name}: not YAML: {_one_line(error)}") from None
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
            raise ConfigError(
                f"{name}:{line}: {text} would run code, and a manifest only names things; use `type:`"
            )
        if at_root and text.split(".")[0] == "hydra":
            raise ConfigError(f"{name}:{line}: keys of Hydra's own are set by caramba; remove {text}")
        if at_root and text == "defaults" and re.search(r"\bhydra\b|\$\{", _texts(value)):
            raise ConfigError(
                f"{name}:{line}: a defaults list may neither set Hydra's own groups nor use ${{…}}; name the option"
            )
        _refuse_node(value, name)


def _texts(node: Any) -> str:
    """Every key and scalar below a node, as one text."""
    if isinstance(node.value, str):
        return node.value
    parts: list[str] = []
    for item in node.value:
        parts.extend(_texts(child) for child in (item if isinstance(item, tuple) else (item,)))
    return " ".join(parts)


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


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
