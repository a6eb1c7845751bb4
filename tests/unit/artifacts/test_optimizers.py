"""A table of optimisers has a row each, with intervals against AdamW, and its plot marks switches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from caramba import artifacts
from caramba.artifacts.optimizers import draw_optimizers, interval_text
from caramba.artifacts.training_curves import read_marks
from caramba.result import BenchmarkResult, Metric, RunResult


def row_of(name: str, low: float, high: float, decisions: list[dict[str, Any]]) -> dict[str, Any]:
    curve = [{"tokens": 100 * at, "seconds": 0.1 * at, "loss": 6.0 - 0.1 * at} for at in range(1, 6)]
    run = {"steps": 5, "trial_steps": 0, "tokens": 500, "curve": curve, "decisions": decisions}
    return {
        "model": "student",
        "row": name,
        "skipped": None,
        "trial_tokens": 1200,
        "loss_difference": {"mean": (low + high) / 2, "low": low, "high": high},
        "runs": [run],
    }


def result_of() -> RunResult:
    switch = {"phase": "pretrain", "step": 3, "strategy": "conservative_adamw", "choice": "muon"}
    fixed = {
        "best_fixed": "muon",
        "best_fixed_difference": {"low": 0.11, "high": 0.12},
        "best_fixed_difference_at_equal_time": {"low": 0.21, "high": 0.22},
    }
    ours = row_of("orchestrator", -0.02, 0.01, [switch]) | fixed
    left_out = {"model": "student", "row": "lion", "skipped": "lion takes about 40 s more"}
    adamw = row_of("adamw", 0.0, 0.0, []) | {"equal_time_skipped": "adamw takes about 30 s more"}
    rows = (adamw, ours, left_out)
    metrics = tuple(
        Metric(f"optimizers.student.{field}@row={row['row']}", 5.5, "nats/token", 3, None, "optimizers")
        for row in (adamw, ours)
        for field in ("lr", "val_loss", "val_loss_deviation", "seconds")
    )
    bench = BenchmarkResult("optimizers", "optimizers", rows=rows, metrics=metrics)
    return RunResult("table", "run", "0" * 64, None, {}, {}, benchmarks=(bench,))


def test_a_table_and_its_plot_are_written(tmp_path: Path) -> None:
    artifacts.write(result_of(), tmp_path)
    page = (tmp_path / "artifacts" / "report.html").read_text()
    assert "-0.0200 to +0.0100" in page
    assert "1,200" in page
    assert "muon: +0.1100 to +0.1200" in page
    assert "+0.2100 to +0.2200" in page
    assert "lion takes about 40 s more" in page
    assert "adamw takes about 30 s more" in page
    assert (tmp_path / "artifacts" / "optimizers.png").stat().st_size > 5_000
    assert draw_optimizers(RunResult("a", "run", "0" * 64, None, {}, {})) == (None, [])
    assert interval_text(None) == "-"


def test_switches_and_answers_to_spikes_are_marks(tmp_path: Path) -> None:
    assert read_marks(tmp_path) == []
    lines = [
        {"phase": "a", "step": 5, "strategy": "x", "choice": "x"},
        {"phase": "a", "step": 10, "strategy": "x", "choice": "y"},
        {"phase": "a", "step": 12, "choice": "y", "safety": "undo"},
    ]
    (tmp_path / "decisions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert read_marks(tmp_path) == [("a", 10, "y"), ("a", 12, "undo")]
