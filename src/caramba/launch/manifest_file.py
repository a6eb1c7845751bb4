"""Single-file manifests: the same schema, written in one YAML or JSON file, with overrides on top."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path as File
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from caramba.config.resolve import load_tree, read_text, resolve
from caramba.config.source import Path
from caramba.errors import ConfigError, one_line, quote
from caramba.launch.config_files import MergedFile, Origin, SetPath, groups, show_file
from caramba.launch.overrides import Override, parse_overrides, refuse_sweeps, refuse_unsafe_overrides


def read_file(file: File, overrides: Sequence[str]) -> tuple[dict[str, Any], Origin, frozenset[Path]]:
    """Read a manifest file, apply overrides, and resolve references.

    Returns:
        The tree, where its values were written, and the paths that the overrides set.

    Raises:
        ConfigError: no such file, no YAML mapping, an override that fits no key, or a reference to a missing key.
    """
    file = file.absolute()
    name = show_file(file)
    if not file.is_file():
        raise ConfigError(f"manifest={name}: no such file; give a YAML manifest, or choose groups (model=… train=…)")
    refuse_unsafe_overrides(overrides)
    parsed = parse_overrides(overrides, {}, ())
    refuse_sweeps(parsed)
    tree: Any = _load(file, name)
    try:
        if parsed:  # only overrides need a config; it takes most of the time
            config = OmegaConf.create(tree)
            assert isinstance(config, DictConfig)
            for override in parsed:
                _apply(config, override, name)
            tree = OmegaConf.to_container(config, resolve=False)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{name}: {one_line(error)}") from None
    assert isinstance(tree, dict)
    origin = Origin(
        lambda: [MergedFile(file, ())],
        [SetPath(path, override.typed) for override in parsed for path in override.paths],
    )
    plain = {str(key): value for key, value in tree.items()}
    return resolve(plain, origin), origin, frozenset(path for override in parsed for path in override.paths)


def _load(file: File, name: str) -> dict[str, Any]:
    try:
        tree = load_tree(read_text(file, name), name)
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{name}: not YAML: {one_line(error)}") from None
    if not isinstance(tree, dict | None):
        raise ConfigError(f"{name}: a manifest is a mapping with name, model and groups; got {quote(tree)}")
    return {str(key): value for key, value in (tree or {}).items()}


def _apply(config: DictConfig, override: Override, name: str) -> None:
    key = ".".join(str(part) for part in override.path)
    if override.path[0] in groups() and len(override.path) == 1:
        raise ConfigError(
            f"command line: {override.typed}: {name} is the whole experiment, so no group can be chosen; set keys"
        )
    try:
        if override.hydra.is_delete():
            parent = OmegaConf.select(config, key.rpartition(".")[0]) if "." in key else config
            del parent[override.path[-1]]
            return
        if override.path[0] == "settings" and "defaults" in config:
            key = "defaults" + key.removeprefix("settings")
        OmegaConf.update(config, key, override.hydra.value(), force_add=True)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OmegaConfBaseException) as error:
        raise ConfigError(f"command line: {override.typed}: does not fit {name}: {one_line(error)}") from None
