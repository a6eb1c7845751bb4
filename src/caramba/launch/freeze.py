"""From a command line to a validated Manifest: compose or read a file, check the schema, lower, check again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as File
from typing import TYPE_CHECKING, Any

from caramba.config.composition import Composition
from caramba.config.crosscheck import check_vocabulary, cross_check, refuse_unbuilt
from caramba.config.lower import Lowered, lower_file, lower_groups
from caramba.config.manifest import GroupConfig, Manifest, parse_manifest
from caramba.config.model import FitConfig
from caramba.config.parse import parse_as
from caramba.config.plugins import use_plugins
from caramba.config.source import Path, format_place, read_path
from caramba.config.train import PhaseConfig
from caramba.errors import ConfigError, nearest
from caramba.launch.config_files import Origin, groups
from caramba.launch.derive import derive_models
from caramba.launch.scale import SCALED, scale_train

if TYPE_CHECKING:
    from caramba.config.estimate import FitResult


@dataclass(frozen=True)
class Frozen:
    """A validated manifest with what is needed to speak of it in the user's terms.

    `is_data_chosen` is false when the data is merely that of the defaults list; `fit` tells how the model was
    scaled, when the manifest asked for it.
    """

    manifest: Manifest
    overrides: tuple[str, ...]
    source: Origin
    origins: dict[Path, Path]
    is_data_chosen: bool = True
    fit: FitResult | None = None

    def check_vocabulary(self) -> None:
        """Raise when data and model have different vocabularies."""
        check_vocabulary(self.manifest)

    def refuse_unbuilt(self) -> None:
        """Raise when the manifest asks for behaviour that is not built."""
        refuse_unbuilt(self.manifest, source=self.source, origins=self.origins)


def freeze(overrides: Sequence[str], config_dirs: Sequence[File] = ()) -> Frozen:
    """Turn overrides into a checked manifest; `manifest=FILE` among them reads a single file instead of the groups.

    Raises:
        ConfigError: everything that is wrong, with paths, places and nearest names.
    """
    named = [word for word in overrides if word.lstrip("+").startswith("manifest=")]
    if named:
        if config_dirs:
            raise ConfigError(
                "--config-dir adds groups, and a manifest file uses none; leave one of the two out"
            )
        file = File(named[-1].split("=", 1)[1]).expanduser()
        rest = [word for word in overrides if word not in named]
        frozen = _from_file(file, rest, tuple(overrides))
    else:
        frozen = _from_groups(overrides, config_dirs)
    if frozen.manifest.fit is not None:
        from caramba.launch.freeze import resolve_fit

        manifest, derivation = resolve_fit(frozen.manifest, frozen.manifest.fit, frozen.overrides)
        frozen = dataclasses.replace(frozen, manifest=manifest, fit=derivation)
    cross_check(frozen.manifest)
    _check_widths(frozen)
    return frozen


def _check_widths(frozen: Frozen) -> None:
    from caramba.config.estimate import check_variants, check_widths

    try:
        check_widths(frozen.manifest.model)
    except ConfigError as error:
        path = read_path(str(error).partition(": ")[0])
        raise ConfigError(f"{error}{format_place(path, frozen.source)}") from None
    if any(run.exp is not None for group in frozen.manifest.groups_to_run() for run in group.runs):
        check_variants(frozen.manifest)


def _from_groups(overrides: Sequence[str], config_dirs: Sequence[File]) -> Frozen:
    from caramba.launch.compose import compose

    composed = compose(overrides, config_dirs)
    tree = _with_plugins(derive_models(composed.tree, composed.source), composed.source)
    if composed.choices.get("train") in SCALED:
        tree = scale_train(tree, composed.given)
    parse_as(Composition, tree, source=composed.source)
    _refuse_foreign_group(tree, composed.choices)
    lowered = lower_groups(tree, composed.choices, composed.given, composed.chosen)
    frozen = _finish(lowered, tree, composed.source, composed.overrides)
    is_data_chosen = "data" in composed.chosen or any(path[0] == "data" for path in composed.given)
    return dataclasses.replace(frozen, is_data_chosen=is_data_chosen)


def _from_file(file: File, overrides: Sequence[str], typed: tuple[str, ...]) -> Frozen:
    from caramba.launch.manifest_file import read_file

    tree, source, given = read_file(file, overrides)
    tree = _with_plugins(derive_models(tree, source), source)
    lowered = lower_file(tree, file.stem, given)
    return _finish(lowered, tree, source, typed)


def _with_plugins(tree: dict[str, Any], source: Origin) -> dict[str, Any]:
    """Import the plugins of a tree and note the folders that they are in; the types of its nodes are known then."""
    found = use_plugins(tree, source=source, is_typed=True)
    return {**tree, "plugins": found} if found else tree


def _finish(lowered: Lowered, tree: dict[str, Any], source: Origin, overrides: tuple[str, ...]) -> Frozen:
    manifest = parse_manifest(lowered.manifest, source=source, origins=lowered.origins, typed=tree)
    return Frozen(manifest, overrides, source, lowered.origins)


def _refuse_foreign_group(tree: dict[str, Any], choices: dict[str, str]) -> None:
    """`group=` selects a group of a manifest; composed groups make one, named after the benchmark option."""
    group, suite = tree.get("group"), choices.get("benchmark", "none")
    if group is None or group == ("main" if suite == "none" else suite):
        return
    known = groups().get("benchmark", {})
    way = (
        f"write benchmark={group}"
        if group in known
        else f"options of benchmark: {', '.join(known)}{nearest(group, known)}"
    )
    raise ConfigError(f"group={group} selects a group of a single-file manifest; for composed groups {way}")


def resolve_fit(
    manifest: Manifest, fit_config: FitConfig, overrides: Sequence[str]
) -> tuple[Manifest, FitResult]:
    """Return the manifest with its model fitted and the section gone, and the derivation.

    The derivation is added to the manifest's notes. Training phases take `fit.block_size` unless a block size was
    typed for them.

    Raises:
        ConfigError: a target that cannot be reached, or a model whose weights fix its shape.
    """
    from caramba.config.estimate import FitRow, fit

    result = fit(manifest.model, fit_config.target_params, fit_config.block_size)
    groups = manifest.groups
    block_size = fit_config.block_size
    if block_size is not None and not _is_typed(overrides):
        before = sorted({run.train.block_size for group in groups for run in group.runs if run.train})
        groups = tuple(_with_block_size(group, block_size) for group in groups)
        if before and before != [block_size]:
            row = FitRow(
                "train.block_size",
                ", ".join(map(str, before)),
                str(block_size),
                "fit.block_size, since none was typed",
            )
            result = dataclasses.replace(result, rows=(*result.rows[:-1], row, result.rows[-1]))
    notes = f"{manifest.notes}\n{result.note}" if manifest.notes else result.note
    changed = {"model": result.model, "fit": None, "groups": groups, "notes": notes}
    return manifest.model_copy(update=changed), result


def _is_typed(overrides: Sequence[str]) -> bool:
    """Whether the command line sets the block size of a phase, under any of its names."""
    names = {alias for alias, name in PhaseConfig.aliases.items() if name == "block_size"} | {"block_size"}
    keys = [word.lstrip("+").partition("=")[0].split(".") for word in overrides]
    return any("train" in key[:-1] and key[-1] in names for key in keys)


def _with_block_size(group: GroupConfig, block_size: int) -> GroupConfig:
    runs = tuple(
        run
        if run.train is None
        else run.model_copy(update={"train": run.train.model_copy(update={"block_size": block_size})})
        for run in group.runs
    )
    return group.model_copy(update={"runs": runs})
