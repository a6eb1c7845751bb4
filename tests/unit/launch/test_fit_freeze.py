"""Auto-fit on the command line: what a launch freezes is the fitted model, in concrete numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from caramba.config.estimate import model_cost
from caramba.config.manifest import Manifest
from caramba.errors import ConfigError
from caramba.launch.freeze import freeze


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def block_sizes(manifest: Manifest) -> set[int]:
    return {run.train.block_size for group in manifest.groups for run in group.runs if run.train is not None}


def test_the_frozen_model_is_of_the_asked_size_and_asks_for_nothing_more() -> None:
    frozen = freeze(["model=tiny", "train=pretrain", "fit.target_params=3M", "fit.block_size=256"])
    manifest = frozen.manifest
    params = model_cost(manifest.model).params
    assert abs(params - 3_000_000) <= 0.02 * 3_000_000
    assert frozen.fit is not None
    assert frozen.fit.params == params
    assert manifest.fit is None
    assert block_sizes(manifest) == {256}
    assert frozen.fit.note in manifest.notes
    # A manifest that was read back is the same network, fitted no second time.
    again = Manifest.model_validate_json(manifest.model_dump_json())
    assert again.model == manifest.model
    plain = freeze(["model=tiny", "train=pretrain"])
    assert plain.fit is None
    assert plain.manifest.model.embedder.d_model < manifest.model.embedder.d_model


@pytest.mark.parametrize("typed", ["train.block_size=64", "train.phases.pretrain.block_size=64"])
def test_a_typed_block_size_stays(typed: str) -> None:
    manifest = freeze(["model=tiny", "train=pretrain", "fit.target_params=3M", "fit.block_size=256", typed]).manifest
    assert block_sizes(manifest) == {64}


def test_a_target_out_of_reach_is_refused_with_the_nearest_size() -> None:
    with pytest.raises(ConfigError, match=r"fit\.target_params=1,?000\b"):
        freeze(["model=tiny", "train=pretrain", "fit.target_params=1000"])
