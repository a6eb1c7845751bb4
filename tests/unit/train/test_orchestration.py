"""An orchestrated phase: AdamW alone is AdamW to the bit, decisions are recorded, repeated, resumed and replayed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from caramba.data import WindowSampler
from caramba.distill import LanguageModelObjective
from caramba.errors import ConfigError
from caramba.model import build_model
from caramba.optim import learning_rate
from caramba.optim.nowcast import Snapshots
from caramba.train.data import train_loader
from caramba.train.orchestration.trials import Trials
from tests.unit.model.model_specs import NORM, spec
from tests.unit.train.orchestrated import (
    SEED,
    KillAt,
    KilledError,
    Trained,
    orchestrated,
    phase_of,
    train,
    windows,
)


def without_times(decisions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for one in decisions:
        kept = {key: value for key, value in one.items() if key not in ("cost", "inputs")}
        found.append({**kept, "steps": one.get("cost", {}).get("steps")})
    return found


def test_off_is_a_plain_loop_to_the_bit(tmp_path: Path) -> None:
    phase = phase_of(steps=20, save_every=None)
    ours = train(phase, tmp_path)
    assert ours.callback is None
    assert ours.module.guard is None
    assert list(tmp_path.iterdir()) == []

    objective = LanguageModelObjective(build_model(spec(NORM), seed=0))
    model = objective.model.train()
    decayed = [p for name, p in model.named_parameters() if p.ndim > 1 and not name.startswith("embedder")]
    kept = [p for p in model.parameters() if all(p is not one for one in decayed)]
    groups = [{"params": decayed, "weight_decay": phase.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=phase.betas, fused=True)
    loader = train_loader(windows(), phase, seed=SEED, start=0, pin=False)
    for step, batch in enumerate(itertools.islice(loader, phase.steps)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(phase, step)
        objective.step(batch, torch.Tensor.backward)
        assert phase.max_grad_norm is not None
        torch.nn.utils.clip_grad_norm_(model.parameters(), phase.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    assert [p.detach().flatten().tolist() for p in model.parameters()] == ours.weights


@pytest.mark.parametrize("interval", [1, 7, 10])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_adamw_alone_is_adamw_to_the_bit(interval: int, accumulation: int, tmp_path: Path) -> None:
    keys = {"steps": 20, "gradient_accumulation_steps": accumulation, "save_every": None}
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    plain = train(phase_of(**keys), tmp_path / "a")
    alone = {"orchestrator_strategies": ["conservative_adamw"], "orchestrator_decision_interval": interval}
    ours = train(orchestrated(**keys, **alone), tmp_path / "b")
    assert ours.weights == plain.weights
    assert [one["step"] for one in ours.decisions] == list(range(interval, 20, interval))


def test_trials_leave_the_run_as_it_was_and_monitor_changes_nothing(tmp_path: Path) -> None:
    """All candidates diverge to a score that never wins, so the run is that of AdamW; so is monitor's."""
    for name in "abc":
        (tmp_path / name).mkdir()
    plain = train(phase_of(save_every=None), tmp_path / "a")
    bad = {"optimizer": "lion", "rate": 1000.0}
    strategies = {"conservative_adamw": None, "bad": bad}
    options: dict[str, Any] = {"save_every": None, "orchestrator_ramp_steps": 0}
    ours = train(orchestrated(orchestrator_strategies=strategies, **options), tmp_path / "b")
    assert [one["choice"] for one in ours.decisions if "safety" not in one] == ["conservative_adamw"] * 3
    assert ours.callback is not None
    assert ours.callback.orchestrator.trial_steps == sum(one["cost"]["steps"] for one in ours.decisions) > 0
    assert ours.weights == plain.weights
    seen = train(orchestrated(orchestrator_mode="monitor", save_every=None), tmp_path / "c")
    assert seen.weights == plain.weights
    inputs = seen.decisions[-1]["inputs"]
    assert inputs["loss_slope"] < 0
    assert 0 < inputs["gradient_noise"] < 1
    assert 0 < inputs["update_over_weight"] < 0.1
    assert seen.decisions[-1]["cost"]["steps"] == 0


SWITCHES = {
    "orchestrator_strategies": {"slow": {"optimizer": "adamw", "rate": 0.02}, "muon": None, "lion": None},
    "orchestrator_initial_strategy": "slow",
}
"""The strategy at the start is so slow that another takes over."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    found = train(orchestrated(**SWITCHES), tmp_path_factory.mktemp("whole"))
    assert found.decisions[0]["strategy"] == "slow"
    assert found.decisions[-1]["choice"] != "slow"
    return found


def test_a_decision_says_what_it_read_and_why(whole: Trained) -> None:
    first = next(one for one in whole.decisions if one["choice"] != one["strategy"])
    assert first["challenger"] == first["choice"]
    assert first["interval"][2] < 0
    assert len(first["scores"]["slow"]) == 2
    assert "interval excludes 0" in first["reason"]
    assert first["cost"]["tokens"] == first["cost"]["steps"] * 4 * 8
    later = [one for one in whole.decisions if one["step"] > first["step"]]
    assert all(one["strategy"] == first["choice"] for one in later[:1])


@pytest.mark.parametrize("step", [5, 10, 11, 20, 21, 35])
def test_a_killed_run_goes_on_bit_equal(step: int, whole: Trained, tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        train(orchestrated(**SWITCHES), tmp_path, [KillAt(step)])
    again = train(orchestrated(**SWITCHES), tmp_path)
    assert again.weights == whole.weights
    assert without_times(again.decisions) == without_times(whole.decisions)


@pytest.mark.parametrize("call", [1, 4, 7])
def test_a_kill_within_a_trial_leaves_the_state_before_it(
    call: int, whole: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    train_ = Trials._train

    def killed(self: Trials, *arguments: Any) -> None:
        nonlocal calls
        calls += 1
        train_(self, *arguments)
        if calls == call:
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(Trials, "_train", killed)
        with pytest.raises(KilledError):
            train(orchestrated(**SWITCHES), tmp_path)
    again = train(orchestrated(**SWITCHES), tmp_path)
    assert again.weights == whole.weights
    assert without_times(again.decisions) == without_times(whole.decisions)


def test_replay_follows_decisions_without_trials(whole: Trained, tmp_path: Path) -> None:
    path = tmp_path / "earlier.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in whole.decisions))
    keys = {"orchestrator_policy": "replay", "orchestrator_decisions": str(path)}
    (tmp_path / "run").mkdir()
    again = train(orchestrated(**SWITCHES, **keys), tmp_path / "run")
    assert again.weights == whole.weights
    assert [one["choice"] for one in again.decisions] == [one["choice"] for one in whole.decisions]
    assert again.callback is not None
    assert again.callback.orchestrator.trial_steps == 0
    with pytest.raises(ConfigError, match=r"decisions of another manifest, \w{16}, expected \w{16}"):
        train(orchestrated(**SWITCHES, **keys, lr=2e-2), tmp_path / "run")
    path.write_text('{"step": 3}\n')
    with pytest.raises(ConfigError, match=r"earlier.jsonl:1: expected a JSON object with phase, step and choice"):
        train(orchestrated(**SWITCHES, **keys), tmp_path / "run")
    path.unlink()
    with pytest.raises(ConfigError, match=r"no such file; give the decisions\.jsonl of a run"):
        train(orchestrated(**SWITCHES, **keys), tmp_path / "run")


def test_identical_candidates_never_switch(tmp_path: Path) -> None:
    adamw = {"optimizer": "adamw", "rate": 1.0}
    for policy in ("halving", "ucb"):
        (tmp_path / policy).mkdir()
        (tmp_path / f"{policy}_plain").mkdir()
        strategies = {"conservative_adamw": None, "b": adamw, "c": adamw, "d": adamw}
        ours = train(
            orchestrated(orchestrator_strategies=strategies, orchestrator_policy=policy, save_every=None),
            tmp_path / policy,
        )
        assert {one["choice"] for one in ours.decisions} == {"conservative_adamw"}
        intervals = [one["interval"] for one in ours.decisions if one["interval"] is not None]
        assert intervals
        assert all(interval == [0.0, "-inf", "inf"] for interval in intervals), "one pair of trials is enough"
        plain = train(phase_of(save_every=None), tmp_path / f"{policy}_plain")
        assert ours.weights == plain.weights
        assert [one["cost"]["steps"] > 0 for one in ours.decisions] == [True, True, False]
        assert ours.decisions[2]["reason"] == "trials at step 20 changed nothing: again from twice that"


def test_the_first_decision_comes_early_and_the_next_after_an_interval(tmp_path: Path) -> None:
    keys = {"steps": 55, "orchestrator_decision_interval": 50, "save_every": None, "orchestrator_mode": "monitor"}
    for warmup, first in ((4, 40), (45, 45)):
        (tmp_path / str(warmup)).mkdir()
        found = train(orchestrated(**keys, warmup_steps=warmup), tmp_path / str(warmup))
        assert [one["step"] for one in found.decisions] == [first, 50]


def test_a_budget_that_is_spent_ends_the_trials(tmp_path: Path) -> None:
    phase = orchestrated(orchestrator_budget=0.6, save_every=None)
    found = train(phase, tmp_path)
    assert found.callback is not None
    assert 0 < found.callback.orchestrator.trial_steps <= 0.6 * phase.steps
    assert "of the budget are spent, a decision takes" in found.decisions[-1]["reason"]


def test_a_trial_that_runs_out_of_memory_scores_infinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_ = Trials._train

    def short_of_memory(self: Trials, *arguments: Any) -> None:
        if self.portfolio.pending == "muon":
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")
        train_(self, *arguments)

    monkeypatch.setattr(Trials, "_train", short_of_memory)
    strategies = ["conservative_adamw", "muon"]
    found = train(orchestrated(orchestrator_strategies=strategies, save_every=None), tmp_path)
    assert found.decisions[0]["scores"]["muon"] == ["inf"]
    assert found.decisions[0]["choice"] == "conservative_adamw"
    assert len(found.decisions) == 3, "the run went on"


def test_a_trial_is_by_the_strategys_own_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, float]] = []
    train_ = Trials._train

    def recorded(self: Trials, *arguments: Any) -> None:
        train_(self, *arguments)
        group = self.portfolio.param_groups[0]
        seen.append((self.portfolio.active, group["ramp"], self.portfolio._factor(group)))

    monkeypatch.setattr(Trials, "_train", recorded)
    strategies = {"conservative_adamw": None, "fast": {"optimizer": "lion", "rate": 3.0}}
    found = train(orchestrated(orchestrator_strategies=strategies, steps=20, save_every=None), tmp_path)
    assert {(ramp, factor) for name, ramp, factor in seen if name == "fast"} == {(1, 3.0)}
    assert found.callback is not None
    assert found.callback.portfolio.ramp_steps == 5, "a switch takes the phase's"


def test_windows_that_score_are_read_by_no_step(tmp_path: Path) -> None:
    found = train(orchestrated(steps=20, save_every=None), tmp_path)
    assert found.callback is not None
    data = found.callback.orchestrator.data
    assert data is not None
    sampler = WindowSampler(len(data.dataset), 4, seed=3)
    read = {sampler.window(sample) for sample in range((20 + 3 * 4) * 4)}
    assert len(data.held_out) == 64
    assert not read & set(data.held_out)
    with pytest.raises(ConfigError, match="leave 0 to score decisions by, expected 8 or more; use fewer steps"):
        train(orchestrated(steps=300), tmp_path)


def test_a_portfolio_that_does_not_fit_is_refused_with_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("caramba.train.orchestration.build.free_bytes", lambda device: 1000)
    with pytest.raises(ConfigError, match=r"states of the portfolio take [\d,]+ bytes .* the 1,000 free on cpu"):
        train(orchestrated(), tmp_path)


@pytest.mark.parametrize("is_good", [True, False])
def test_a_jump_is_kept_only_if_it_helps(is_good: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forecast of noise is undone to the bit; one of much better weights stays."""
    keys: dict[str, Any] = {
        "save_every": None,
        "steps": 30,
        "orchestrator_strategies": ["conservative_adamw"],
        "orchestrator_use_nowcasting": True,
        "orchestrator_decision_interval": 20,
    }
    for name in ("later", "ours", "plain"):
        (tmp_path / name).mkdir()
    trained = train(phase_of(save_every=None, steps=300), tmp_path / "later").module.model.parameters()
    better = [value.detach().clone() for value in trained]

    def forecast(self: Snapshots, name: str, ahead: float, now: list[torch.Tensor]) -> list[torch.Tensor]:
        return better if is_good else [torch.randn_like(value) for value in better]

    monkeypatch.setattr(Snapshots, "forecast", forecast)
    ours = train(orchestrated(**keys), tmp_path / "ours")
    plain = train(phase_of(save_every=None, steps=30), tmp_path / "plain")
    jump = ours.decisions[0]["nowcast"]
    assert jump["kept"] is is_good
    assert (float(jump["interval"][2]) < 0) is is_good
    assert (ours.weights == plain.weights) is not is_good
    assert ours.decisions[0]["cost"]["steps"] == 2 * 4 * (2 if is_good else 1), "a bad jump is not repeated"
    assert ours.callback is not None
    assert ours.callback.orchestrator.snapshots is not None
    assert len(ours.callback.orchestrator.snapshots.weights) <= 2, "copies on the host"


def test_nowcasting_goes_on_bit_equal_after_a_kill(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"orchestrator_use_nowcasting": True}
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole = train(orchestrated(**keys), tmp_path / "whole")
    assert any(one["nowcast"] for one in whole.decisions)
    with pytest.raises(KilledError):
        train(orchestrated(**keys), tmp_path / "cut", [KillAt(17)])
    again = train(orchestrated(**keys), tmp_path / "cut")
    assert again.weights == whole.weights
    assert without_times(again.decisions) == without_times(whole.decisions)
