"""Spikes are clipped, left out, undone or rolled back, and clean runs are left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from caramba.errors import CheckpointError
from caramba.train.orchestration.guard import MOST, Guard, RobustScore
from tests.unit.train.orchestrated import KillAt, KilledError, orchestrated, phase_of, train

STEPS = 80
KEYS: dict[str, Any] = {
    "steps": STEPS,
    "save_every": None,
    "orchestrator_strategies": ["conservative_adamw", "spike_resistant"],
    "orchestrator_decision_interval": 70,
    "orchestrator_eval_horizon": 2,
    "orchestrator_safety_strategy": "spike_resistant",
}


class Spike(pl.Callback):
    """Damages one step."""

    def __init__(self, kind: str, step: int, seed: int = 0) -> None:
        self.kind, self.step, self.seed = kind, step, seed

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self.step:
            return
        portfolio = trainer.optimizers[0]
        generator = torch.Generator().manual_seed(self.seed)
        if self.kind == "batch":
            batch[1].copy_(torch.randint(23, batch[1].shape, generator=generator))
            batch[0].copy_(torch.randint(23, batch[0].shape, generator=generator))
        elif self.kind == "moments":
            for state in portfolio.state.values():
                state["exp_avg"].mul_(300.0)
        elif self.kind == "squares":
            for state in portfolio.state.values():
                state["exp_avg_sq"].mul_(1e-6)
        elif self.kind == "rate":
            rate = module._learning_rate
            module._learning_rate = lambda step, steps: rate(step, steps) * (30.0 if step == self.step else 1.0)
        elif self.kind == "weights":
            with torch.no_grad():
                for p in module.model.parameters():
                    p.mul_(8.0)


def held_out(found: Any) -> float:
    from caramba.train.orchestration.trials import TrialData
    from tests.unit.train.orchestrated import windows

    data = TrialData(windows(), orchestrated(**KEYS), seed=3, start=0, per_step=4, share=(0, 1))
    losses = [float(found.module.objective.evaluate(batch)["loss"]) for batch in data.scoring(None)]
    return sum(losses) / len(losses)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> float:
    found = train(orchestrated(**KEYS), tmp_path_factory.mktemp("clean"))
    assert not [one for one in found.decisions if "safety" in one], "no false alarm"
    return held_out(found)


@pytest.mark.parametrize("kind", ["moments", "squares", "rate", "weights"])
def test_a_spike_is_answered_and_the_run_ends_as_a_clean_one(kind: str, clean: float, tmp_path: Path) -> None:
    found = train(orchestrated(**KEYS), tmp_path, [Spike(kind, 50)])
    answers = [one["safety"] for one in found.decisions if "safety" in one]
    assert answers
    assert set(answers) <= set(MOST)
    assert held_out(found) == pytest.approx(clean, rel=0.03)
    (tmp_path / "bare").mkdir()
    bare = train(phase_of(steps=STEPS, save_every=None), tmp_path / "bare", [Spike(kind, 50)])
    if kind in ("moments", "weights"):
        assert held_out(bare) > 1.02 * clean, "without the guard it does harm"


def test_after_going_back_the_safety_strategy_steps(tmp_path: Path) -> None:
    found = train(orchestrated(**KEYS), tmp_path, [Spike("moments", 50)])
    first, second = [one for one in found.decisions if one.get("safety") == "undo"][:2]
    assert (first["step"], first["back_to"], first["choice"]) == (50, 50, "conservative_adamw")
    assert (second["step"], second["choice"]) == (51, "spike_resistant"), "states make such updates: they go back"
    assert second["back_to"] <= 49
    assert found.callback is not None
    assert found.callback.portfolio.active == "spike_resistant"
    assert found.callback.guard is not None
    assert len(found.callback.guard.snapshots) <= 2


def test_a_run_killed_between_an_answer_and_its_reading_goes_on_bit_equal(tmp_path: Path) -> None:
    """Damaged states stay in a resumed run, and the step at which they come is before the first kill."""
    keys = KEYS | {"save_every": 1, "steps": 60, "orchestrator_decision_interval": 58}
    (tmp_path / "whole").mkdir()
    whole = train(orchestrated(**keys), tmp_path / "whole", [Spike("moments", 50)])
    answers = [(one["safety"], one["step"]) for one in whole.decisions if "safety" in one]
    assert answers[:2] == [("undo", 50), ("undo", 51)]
    (tmp_path / "cut").mkdir()
    for step in (51, 52, 53, None):
        kill = [] if step is None else [KillAt(step)]
        try:
            again = train(orchestrated(**keys), tmp_path / "cut", [Spike("moments", 50), *kill])
        except KilledError:
            continue
    assert again.weights == whole.weights
    assert [one for one in again.decisions if "safety" in one] == [one for one in whole.decisions if "safety" in one]


def test_answers_are_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MOST, "undo", 0)
    monkeypatch.setitem(MOST, "rollback", 0)
    found = train(orchestrated(**KEYS), tmp_path, [Spike("moments", 50)])
    assert not {"undo", "rollback"} & {one.get("safety") for one in found.decisions}


def test_a_robust_score_knows_a_spike_from_noise() -> None:
    score = RobustScore()
    for at in range(40):
        assert abs(score(1.0 + 0.01 * (at % 5))) < 5
        score.add(1.0 + 0.01 * (at % 5))
    assert score(1.5) > 10
    assert score(float("nan")) == float("inf")
    assert score(0.9) < 0


def test_a_state_of_an_earlier_version_is_refused() -> None:
    guard = Guard.__new__(Guard)
    with pytest.raises(CheckpointError, match="of an earlier version"):
        guard.load_state_dict({"loss": [], "norm": [], "update": [], "counts": {}, "high": 0})
