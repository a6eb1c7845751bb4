"""The table of optimisers from the command line: each row searches its rate, trials count, differences are paired."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.commands import SMALL, caramba, only_run

TABLE = "benchmark.benchmarks.0.config"


def test_a_table_of_optimisers_is_measured(tmp_path: Path, cache: Path) -> None:
    words = ["launch", "model=tiny", "train=none", "verify=none", "benchmark=optimizers", "plan=off", *SMALL]
    words += [
        "model.topology.layers.0.repeat=1",
        f"{TABLE}.rows=[adamw,orchestrator]",
        f"{TABLE}.rates=[0.5,1]",
    ]
    words += [f"{TABLE}.steps=40", f"{TABLE}.batch_size=2", f"{TABLE}.block_size=16", f"{TABLE}.seeds=2"]
    words += [f"+{TABLE}.eval_horizon=2", f"+{TABLE}.repeats=2", f"+{TABLE}.val_windows=4"]
    done = caramba(words, tmp_path, cache, draws=True)
    assert done.returncode == 0, done.stdout + done.stderr
    run = only_run(tmp_path)
    adamw, ours = json.loads((run / "optimizers.json").read_text())["rows"]
    assert [row["row"] for row in (adamw, ours)] == ["adamw", "orchestrator"]
    assert [one["rate"] for one in adamw["rates"]] == [one["rate"] for one in ours["rates"]] == [0.5, 1.0]
    assert adamw["tokens"] == 40 * 2 * 16
    assert ours["trial_tokens"] > 0
    assert ours["tokens"] <= adamw["tokens"], "trials are among its steps"
    differences = [a["loss"] - b["loss"] for a, b in zip(ours["runs"], adamw["runs"], strict=True)]
    assert ours["loss_difference"]["mean"] == pytest.approx(sum(differences) / 2)
    assert len(ours["adamw_at_equal_time"]) == 2
    assert all(one["decisions"] for one in ours["runs"])
    report = json.loads((run / "artifacts" / "report.json").read_text())
    assert "optimizers.student.val_loss@row=orchestrator" in report["metrics"]
    assert (run / "artifacts" / "optimizers.png").stat().st_size > 5_000
