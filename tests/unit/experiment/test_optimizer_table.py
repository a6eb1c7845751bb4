"""The table of optimisers by runs that a test makes up: rates, comparisons, and what there is no time for."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from caramba.config.benchmark import BenchmarkConfig
from caramba.errors import CarambaError
from caramba.experiment import optimizer_table
from caramba.experiment.optimizer_table import OptimizerTable
from caramba.experiment.session import StageLedger

SECONDS = {"adamw": 1.0, "muon": 2.0, "lion": 1.0, "orchestrator": 1.5, "nowcast": 1.0}
"""Of a run's step."""
LOSS = {"adamw": 3.0, "muon": 2.0, "lion": 4.0, "orchestrator": 2.5, "nowcast": 3.1}


class MadeUp(OptimizerTable):
    """A table whose runs take no time but that of a clock of its own."""

    def __init__(self, folder: Path, **keys: Any) -> None:
        given = {"type": "optimizers", "steps": 100, "seeds": 2, "rates": [0.5, 1, 2], "lr": 1e-3, **keys}
        bench = BenchmarkConfig.model_validate({"id": "table", "config": given})
        spec = SimpleNamespace(embedder=SimpleNamespace(d_model=8))
        model = SimpleNamespace(spec=spec)
        session: Any = SimpleNamespace(model_of=lambda role: model, run_dir=folder, ledger=StageLedger(folder))
        super().__init__(session, bench, "student")
        self.began, self.clock, self.trained = 0.0, 0.0, []

    def train(self, row: str, rate: float, steps: int, seed: int) -> dict[str, Any]:
        self.trained.append((row, rate, steps, seed))
        self.clock += SECONDS[row] * steps
        self.took.setdefault(row, []).append((0.0, SECONDS[row]))
        loss = LOSS[row] + abs(rate - 1) + seed * 0.1 - steps * 1e-3
        curve = [{"tokens": steps, "seconds": 1.0, "loss": loss}]
        losses = {"loss": loss, "train_loss": loss}
        counted = {"steps": steps, "trial_steps": 0, "tokens": steps, "seconds": SECONDS[row] * steps}
        return {"seed": seed, **counted, **losses, "curve": curve, "decisions": []}


def rows_of(table: MadeUp, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(optimizer_table, "time", SimpleNamespace(perf_counter=lambda: table.clock))
    table.run()
    rows = json.loads((table.session.run_dir / "optimizers.json").read_text())["rows"]
    return {row["row"]: row for row in rows}


def test_the_orchestrator_is_compared_with_the_best_fixed_row_of_its_portfolio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Muon is the best row, though not of a portfolio without it; its runs for the orchestrator's seconds are shorter."""
    table = MadeUp(tmp_path / "a", rows=["adamw", "orchestrator", "muon", "lion"])
    ours = rows_of(table, monkeypatch)["orchestrator"]
    assert ours["best_fixed"] == "muon"
    assert ours["best_fixed_difference"] == {
        "mean": pytest.approx(0.5),
        "low": pytest.approx(0.5),
        "high": pytest.approx(0.5),
        "n": 2,
    }
    assert [run["steps"] for run in ours["best_fixed_at_equal_time"]] == [75, 75], "of 2 seconds a step, not 1.5"
    assert ours["best_fixed_difference_at_equal_time"]["mean"] == pytest.approx(0.5 - 0.025)
    assert [run["steps"] for run in ours["adamw_at_equal_time"]] == [150, 150]

    strategies = ["conservative_adamw", "lion"]
    without = MadeUp(tmp_path / "b", rows=["adamw", "orchestrator", "muon", "lion"], strategies=strategies)
    ours = rows_of(without, monkeypatch)["orchestrator"]
    assert ours["best_fixed"] == "adamw"
    assert ours["best_fixed_at_equal_time"] == ours["adamw_at_equal_time"]
    assert ours["best_fixed_difference"] == ours["loss_difference"]


def test_what_there_is_no_time_for_is_left_out_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of AdamW takes 500 s, one of Muon 1,000: it is found out after two runs. Lion has time again."""
    table = MadeUp(tmp_path / "a", rows=["adamw", "muon", "lion"], seconds=1450)
    rows = rows_of(table, monkeypatch)
    assert list(rows) == ["adamw", "muon", "lion"]
    assert rows["muon"] == {
        "model": "student",
        "row": "muon",
        "skipped": "muon takes about 600 s more, and 550 s of seconds=1450 are left",
    }
    assert rows["lion"]["val_loss"] > 0
    assert rows["lion"]["equal_time_skipped"] == "adamw takes about 200 s more, and 50 s of seconds=1450 are left"
    assert "loss_difference_at_equal_time" not in rows["lion"]
    assert [row for row, _, _, _ in table.trained].count("muon") == 2
    assert table.clock <= 1450


def test_equal_time_of_the_orchestrator_comes_before_that_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = MadeUp(tmp_path / "a", rows=["adamw", "lion", "orchestrator"], seconds=2100)
    rows = rows_of(table, monkeypatch)
    assert rows["orchestrator"]["adamw_at_equal_time"]
    assert "equal_time_skipped" in rows["lion"]


def test_rates_of_rows_that_begin_with_adamw_are_its_own_by_shorter_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"rows": ["adamw", "orchestrator"], "decisions": 1, "decision_interval": 5, "equal_time": False}
    short = MadeUp(tmp_path / "a", **keys, search_steps=30, eval_horizon=8)
    rows = rows_of(short, monkeypatch)
    assert rows["orchestrator"]["rates"] == rows["adamw"]["rates"]
    assert [one for one in short.trained if one[0] == "orchestrator"] == [
        ("orchestrator", 1.0, 100, 0),
        ("orchestrator", 1.0, 100, 1),
    ]
    long = MadeUp(tmp_path / "b", **keys, eval_horizon=1)
    rows_of(long, monkeypatch)
    assert [one[2] for one in long.trained if one[0] == "orchestrator"] == [100, 100, 100, 100, 100]


def test_a_rate_that_diverges_is_not_taken_and_a_row_of_them_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = MadeUp(tmp_path / "a", rows=["adamw", "lion", "muon"], equal_time=False)
    sound = table.train

    def train(row: str, rate: float, steps: int, seed: int) -> dict[str, Any]:
        if row == "muon" or (row == "lion" and rate <= 1):
            raise CarambaError(f"{row} has diverged at {rate}")
        return sound(row, rate, steps, seed)

    monkeypatch.setattr(table, "train", train)
    rows = rows_of(table, monkeypatch)
    assert list(rows) == ["adamw", "lion"]
    assert [one["loss"] is None for one in rows["lion"]["rates"]] == [True, True, False]
    assert rows["lion"]["lr"] == pytest.approx(0.2 * 2e-3)
    (failed,) = table.session.ledger["table.muon"].benchmarks
    assert failed.error == "CarambaError: muon has diverged at 2.0"


@pytest.mark.parametrize("steps", range(120, 400, 7))
def test_the_budget_of_a_run_holds_its_decisions(steps: int, tmp_path: Path) -> None:
    """The share of the steps is no round number: (15 / 22) * 22 is below 15."""
    table = MadeUp(tmp_path, decision_interval=3, eval_horizon=4)
    phase = table.phase_of("orchestrator", 1.0, steps)
    cost = optimizer_table.trial_steps(phase)
    spent = steps - phase.steps
    assert spent % cost == 0
    assert 0 < spent <= phase.orchestrator_budget * phase.steps
