"""The loss of a phase does not depend on how its batches are split over micro-batches and ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.commands import SMALL, caramba, only_run

WORDS = (
    *("launch", "model=tiny", "train=pretrain", "train.steps=6", "train.block_size=32", "device=cpu", *SMALL),
    *("benchmark=none", "verify=none", "settings.instrument=none"),
)
RANKS = ("parallel=ddp", "launcher=torchrun", "launcher.nproc_per_node=2")
SPLITS = {
    "concat": ("train.batch_size=2", "train.accumulate=4"),
    "best_fit": (*RANKS, "train.batch_size=1", "train.accumulate=4"),
}


def loss_of(folder: Path, cache: Path, *words: str) -> float:
    folder.mkdir()
    assert caramba([*WORDS, *words], folder, cache).returncode == 0
    result = only_run(folder) / "result.json"
    return float(json.loads(result.read_text())["phases"][0]["loss"])


@pytest.mark.parametrize("packing", SPLITS)
def test_loss_of_split_batches_is_the_loss_of_the_whole(cache: Path, tmp_path: Path, packing: str) -> None:
    given = f"data.packing={packing}"
    whole = loss_of(tmp_path / "whole", cache, given, "train.batch_size=8")
    assert loss_of(tmp_path / "split", cache, given, *SPLITS[packing]) == pytest.approx(whole, rel=0, abs=1e-5)
