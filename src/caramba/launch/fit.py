"""Resolution of a manifest's `fit` section: the model becomes one of the asked size, in concrete numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from caramba.config.fit import FitConfig
from caramba.config.manifest import GroupConfig, Manifest
from caramba.config.train import PhaseConfig

if TYPE_CHECKING:
    from caramba.config.estimate import FitResult


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
