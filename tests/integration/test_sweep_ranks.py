"""A search whose points are trained by two ranks each: composed once, whatever starts the ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from caramba.runs.events import read_events
from caramba.runs.sweeps import list_sweeps, read_sweep
from tests.integration.commands import SMALL, caramba

WORDS = (
    *("-m", "model=tiny", "train=pretrain", "benchmark=none", "verify=none", "device=cpu", *SMALL),
    *("parallel=ddp", "parallel.dp=2", "train.steps=2", "train.block_size=32", "train.batch_size=2"),
    *("settings.instrument=none", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.seed=1"),
    "train.lr=tag(log,interval(1e-4,1e-2))",
)


def test_a_search_over_runs_of_two_ranks_is_one_search(tmp_path: Path, cache: Path) -> None:
    """Traps: a rank that is started as the command line was repeats the sweep in a second directory; and with Optuna
    draws points of its own, so that ranks train one model at two rates, and the best is that of another study."""
    pytest.importorskip("optuna")
    done = caramba(WORDS, tmp_path, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = list_sweeps(tmp_path / "runs")
    sweep = read_sweep(folder)
    runs = {point.number: sweep.run_of(point) for point in sweep.points}
    made = {file.parent for file in tmp_path.glob("runs/**/manifest.json")}
    assert made == set(runs.values()), "a directory for each point, and no other"
    rates = set()
    for point in sweep.points:
        run = runs[point.number]
        assert run is not None
        assert point.state == "finished"
        decisions = json.loads((run / "plan.json").read_text())["pretrain"]["decisions"]
        assert decisions["data_parallel"]["value"] == 2
        rate = decisions["lr"]["value"]
        assert list(point.overrides) == [f"train.lr={rate}"], "what the study drew is what the ranks were told"
        starts = [event for event in read_events(run) if event["event"] == "run_started"]
        assert len(starts) == 1
        logs = {file.name for file in (run / "logs").glob("torchrun-0/rank-*.err")}
        assert logs == {"rank-0.err", "rank-1.err"}, "both read one frozen manifest"
        rates.add(rate)
    assert len(rates) == 2
    best = min(sweep.points, key=lambda point: point.values["value"])
    assert f"best loss.pretrain: {best.values['value']:.6g} at {best.title}" in done.stdout + done.stderr
