"""Composition: overrides and groups become one plain tree, by Hydra's compose API (which writes nothing)."""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from caramba.config.resolve import resolve
from caramba.config.source import Path
from caramba.errors import ConfigError, clip, one_line
from caramba.launch.config_files import MergedFile, Origin, SetPath, conf_root, config_file, groups, show_file
from caramba.launch.overrides import (
    Override,
    aliases_of,
    parse_overrides,
    refuse_sweeps,
    refuse_unsafe_folder,
    refuse_unsafe_overrides,
    rename_deleted,
)

LONGEST_REASON = 1500
"""Characters of an error of Hydra, which quotes files whole."""


@dataclass(frozen=True)
class Composed:
    """The composed groups before validation.

    `raw` is the tree as composed, `tree` with references resolved and without other names of keys that were given,
    `choices` the option of each group, `given` the paths set on the command line and `chosen` the groups chosen there;
    `source` finds where a value was written.
    """

    raw: dict[str, Any]
    tree: dict[str, Any]
    choices: dict[str, str]
    overrides: tuple[str, ...]
    given: frozenset[Path]
    chosen: frozenset[str]
    source: Origin


def compose(overrides: Sequence[str], config_dirs: Sequence[File] = ()) -> Composed:
    """Compose `conf/config.yaml` under `overrides`; `config_dirs` add groups and options.

    Raises:
        ConfigError: an override that cannot be read, an unknown option, a key that would run code, or a reference to
            a key that does not exist.
    """
    folders = tuple(File(folder).absolute() for folder in config_dirs)
    refuse_unsafe_overrides(overrides)
    for folder in folders:
        refuse_unsafe_folder(folder)
    options = groups(folders)
    parsed = parse_overrides(overrides, options, default_groups())
    refuse_sweeps(parsed)
    parsed = _deleted_as_written(parsed, folders)
    config, choices = _compose(parsed, folders)
    raw = OmegaConf.to_container(config, resolve=False)
    assert isinstance(raw, dict)
    origin = Origin(
        lambda: _layers(parsed, folders),
        [SetPath(path, override.typed) for override in parsed for path in override.paths],
    )
    plain = {str(key): value for key, value in raw.items()}
    given = frozenset(path for override in parsed for path in override.paths)
    # caramba's own options replace no list
    if folders or any(len(override.options) > 1 for override in parsed):
        refuse_replaced(parsed, options, given, origin)
    return Composed(
        raw=plain,
        tree=resolve(_without_other_names(plain, given), origin),
        choices=choices,
        overrides=tuple(overrides),
        given=given,
        chosen=frozenset(override.group for override in parsed if override.group is not None),
        source=origin,
    )


def _deleted_as_written(overrides: Sequence[Override], folders: Sequence[File]) -> list[Override]:
    """Let `~train.KEY` delete what a file set under any name of the key."""
    several = [
        override
        for override in overrides
        if override.group is None and override.hydra.is_delete() and len(aliases_of(override.path)) > 1
    ]
    if not several:
        return list(overrides)
    config, _ = _compose([override for override in overrides if override.group is not None], folders)
    made: list[Override] = []
    for override in overrides:
        if override not in several:
            made.append(override)
            continue
        node: Any = OmegaConf.to_container(config, resolve=False)
        for part in override.path[:-1]:
            node = node.get(part) if isinstance(node, dict) else None
        found = [name for name in aliases_of(override.path) if isinstance(node, dict) and name in node]
        if not found:
            raise ConfigError(
                f"command line: {override.typed}: no file sets {' or '.join(aliases_of(override.path))} there, so "
                "there is nothing to delete; remove it"
            )
        made += [rename_deleted(override, name) for name in found]
    return made


def _without_other_names(raw: dict[str, Any], given: Collection[Path]) -> dict[str, Any]:
    """Return a copy whose phases lack what a file set under another name of a key that the command line gives."""
    tree = copy.deepcopy(raw)
    for path in given:
        if "train" not in path[:-1]:
            continue
        node: Any = tree
        for part in path[:-1]:
            node = node[part] if isinstance(node, dict) and part in node else None
        for other in aliases_of(path):
            if isinstance(node, dict) and (*path[:-1], other) not in given:
                node.pop(other, None)
    return tree


def default_groups() -> list[str]:
    """Return the groups of the defaults list of conf/config.yaml."""
    entries = yaml.safe_load((conf_root() / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    return [key for entry in entries if isinstance(entry, dict) for key in entry if not key.startswith("override ")]


@contextlib.contextmanager
def hydra_ready() -> Iterator[None]:
    """Hydra's global state, set up for caramba.conf and restored afterwards, its errors as ConfigError."""
    try:
        with initialize_config_module("caramba.conf", job_name="caramba", version_base="1.3"):
            yield
    except HydraException as error:
        cause = error.__cause__
        text = str(cause if isinstance(cause, OmegaConfBaseException | IndexError) else error)
        raise ConfigError(f"cannot compose: {clip(_readable(str(error), text), LONGEST_REASON)}") from None
    except (OmegaConfBaseException, IndexError, AttributeError, TypeError, ValueError, OSError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cannot compose: {clip(one_line(error), LONGEST_REASON)}") from None
    except AssertionError as error:
        if not _is_of_hydra(error):
            raise
        raise ConfigError(
            "cannot compose: a defaults list has an entry that is no text; write `- GROUP: OPTION` or `- FILE`"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"cannot compose, a file is not YAML: {clip(one_line(error), LONGEST_REASON)}") from None


def _is_of_hydra(error: AssertionError) -> bool:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "hydra"


def _readable(message: str, cause: str) -> str:
    head = " ".join(message.split("\n\n")[0].split())
    tail = " ".join(cause.split("\n")[0].split())
    return head if tail in head else f"{head}: {tail}"


def _texts(overrides: Sequence[Override], folders: Sequence[File]) -> list[str]:
    search = [f"hydra.searchpath=[{','.join(repr(f'file://{folder}') for folder in folders)}]"] if folders else []
    return [*search, *(override.text for override in overrides)]


def _compose(overrides: Sequence[Override], folders: Sequence[File]) -> tuple[DictConfig, dict[str, str]]:
    with hydra_ready():
        config = hydra_compose("config", overrides=_texts(overrides, folders), return_hydra_config=True)
        chosen = config.hydra.runtime.choices
        choices = {str(key): str(chosen[key]) for key in chosen if chosen[key] is not None and "hydra" not in str(key)}
        OmegaConf.set_struct(config, False)
        del config["hydra"]
    return config, choices


def _layers(overrides: Sequence[Override], folders: Sequence[File]) -> list[MergedFile]:
    """Every file of the composition in merge order, with its package, from Hydra's own defaults list."""
    with hydra_ready():
        loader = GlobalHydra.instance().config_loader()
        listed = loader.compute_defaults_list("config", _texts(overrides, folders), RunMode.RUN).defaults
    layers: list[MergedFile] = []
    for entry in listed:
        path = str(entry.config_path)
        if path.startswith("hydra") or str(entry.package or "").startswith("hydra"):
            continue
        file = config_file(path, folders)
        if file is not None:
            package = tuple(str(entry.package).split(".")) if entry.package else ()
            layers.append(MergedFile(file, package))
    return layers


def refuse_replaced(
    overrides: Sequence[Override],
    options: Mapping[str, Mapping[str, File]],
    given: Collection[Path],
    origin: Origin,
) -> None:
    """Check that every list of items in a typed option is the list that runs.

    Files are merged key by key, but a list is replaced whole: the checks of an experiment would take the place of
    those of a typed `verify=eval`. A list that the command line sets itself is not checked.

    Raises:
        ConfigError: a typed option with a list that a later file replaces; names both files.
    """
    typed = {options[str(override.group)][option]: override for override in overrides for option in override.options}
    lists: dict[Path, tuple[File, Override]] = {}
    for layer, node in origin.layers:
        is_typed = layer.file in typed
        for path, line in _lists(node, layer.package):
            if any(path[: len(key)] == key for key in given):
                continue
            if path in lists and (is_typed or layer.file.parent != lists[path][0].parent):
                file, override = lists[path]
                group, key = override.group, ".".join(map(str, path))
                raise ConfigError(
                    f"command line: {override.typed}: {show_file(layer.file)}:{line} replaces {key} of "
                    f"{show_file(file)}; move that list into an option file of {group}, chosen by "
                    f"`override /{group}: NAME`"
                )
            if is_typed:
                lists[path] = (layer.file, typed[layer.file])


def _lists(node: Any, path: Path) -> Iterator[tuple[Path, int]]:
    """Return the path and line of each list in a file that is empty or has mappings as its items."""
    import yaml

    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        here, line = (*path, str(key.value)), key.start_mark.line + 1
        if isinstance(value, yaml.SequenceNode) and here != ("defaults",):
            if all(isinstance(item, yaml.MappingNode) for item in value.value):
                yield here, line
        else:
            yield from _lists(value, here)
