"""A state of several ranks holds each rank's part once, and ranks take their own parts from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from caramba.config.train import PhaseConfig
from caramba.distill import LanguageModelObjective
from caramba.errors import CheckpointError
from caramba.model import build_model
from caramba.optim import NonFiniteWatch
from caramba.train.module import CarambaModule
from caramba.train.strategies import STAGED
from tests.unit.model.model_specs import NORM, spec


@pytest.mark.parametrize(("rank", "rng", "loss"), [(0, "r0", "l0"), (1, "r1", "l1"), (2, None, "l0")])
def test_a_rank_takes_its_own_part_and_a_new_one_that_of_rank_0(
    rank: int, rng: str | None, loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phase = PhaseConfig(phase="pretrain", steps=1, batch_size=2, block_size=8)
    watch = NonFiniteWatch(phase, tmp_path, "pretrain", lambda _: ())
    module = CarambaModule(LanguageModelObjective(build_model(spec(NORM))), phase, watch)
    monkeypatch.setenv("RANK", str(rank))
    parts = [{"rng": f"r{index}", "running_loss": f"l{index}"} for index in range(2)]
    checkpoint = {"global_step": 3, "ranks": parts}
    module._take_own(checkpoint)
    assert checkpoint == {"global_step": 3, "ranks": parts, "rng": rng, "running_loss": loss}


def test_stages_of_another_number_of_ranks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's part holds the weights of its own blocks, which are others' when the stack is cut otherwise."""
    phase = PhaseConfig(phase="pretrain", steps=1, batch_size=2, block_size=8)
    watch = NonFiniteWatch(phase, tmp_path, "pretrain", lambda _: ())
    module = CarambaModule(LanguageModelObjective(build_model(spec(NORM))), phase, watch, way=STAGED)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(
        CheckpointError,
        match=r"pretrain: parallel=pipeline was saved by 2 ranks, and there are 4: .*start 2",
    ):
        module._take_own({"ranks": [{"rng": "r0"}, {"rng": "r1"}]})
