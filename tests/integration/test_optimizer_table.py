"""The table of optimisers from the command line: each row searches its rate, trials count, differences are paired."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers

from caramba.errors import ConfigError
from caramba.launch.freeze import freeze
from tests.integration.commands import SMALL, caramba, only_run

ROOT = Path(__file__).parents[2]
TABLE = "benchmark.benchmarks.0.config"
WORDS = ("launch", "train=none", "verify=none", "benchmark=optimizers", "plan=off")


def test_a_table_of_optimisers_is_measured(tmp_path: Path, cache: Path) -> None:
    words = [*WORDS, "model=tiny", *SMALL]
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
    for trained in ours["runs"]:
        pairs = [one["cost"]["steps"] for one in trained["decisions"] if one.get("cost", {}).get("steps")]
        room = 2 * 2 if pairs == [2 * 2] else 2 * 2 * 2
        assert trained["steps"] + room == 40, "as long as the trials of its decision leave"
    differences = [a["loss"] - b["loss"] for a, b in zip(ours["runs"], adamw["runs"], strict=True)]
    assert ours["loss_difference"]["mean"] == pytest.approx(sum(differences) / 2)
    assert len(ours["adamw_at_equal_time"]) == 2
    assert ours["best_fixed"] == "adamw", "the one fixed row that there is"
    assert ours["best_fixed_difference"] == ours["loss_difference"]
    assert ours["best_fixed_at_equal_time"] == ours["adamw_at_equal_time"]
    assert all(one["decisions"] for one in ours["runs"])
    report = json.loads((run / "artifacts" / "report.json").read_text())
    assert "optimizers.student.val_loss@row=orchestrator" in report["metrics"]
    assert (run / "artifacts" / "optimizers.png").stat().st_size > 5_000

    out = tmp_path / "record.json"
    words = [str(run), str(run), "--out", str(out), "--model", "one block"]
    done = subprocess.run(
        [sys.executable, "scripts/bench/optimizer_record.py", *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    kept = json.loads(out.read_text())
    assert [row["row"] for row in kept["rows"]] == ["adamw", "orchestrator"], "rows of two runs, each once"
    assert kept["made_by"][0].startswith("caramba launch train=none")
    assert done.stdout.count("| orchestrator |") == 1
    assert out.with_suffix(".png").stat().st_size > 5_000


def test_rows_distil_copies_of_a_student_with_short_trials_of_rates(tmp_path: Path, cache: Path) -> None:
    """Without train=none the command would first train by the default phases, which takes minutes."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2}
    teacher = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads))
    teacher.save_pretrained(tmp_path / "teacher")
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 61, 8_000, dtype=np.uint16))
    words = [*WORDS, f"+{TABLE}.objective=kl", "data=tokens", "data.path=tokens.npy", "device=cpu"]
    words += ["model=hf_dba", "model.teacher.checkpoint=teacher", "model.surgery.calibration_tokens=256"]
    words += [f"{TABLE}.rows=[adamw,orchestrator]", f"{TABLE}.rates=[0.5,1]", f"+{TABLE}.search_steps=20"]
    words += [f"{TABLE}.steps=30", f"{TABLE}.batch_size=2", f"{TABLE}.block_size=16", f"{TABLE}.seeds=2"]
    words += [f"+{TABLE}.eval_horizon=1", f"+{TABLE}.repeats=2", f"+{TABLE}.val_windows=4"]
    words += [f"+{TABLE}.decisions=1", f"+{TABLE}.decision_interval=5", f"{TABLE}.equal_time=false"]
    done = caramba(words, tmp_path, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    adamw, ours = json.loads((only_run(tmp_path) / "optimizers.json").read_text())["rows"]
    assert [len(row["rates"]) for row in (adamw, ours)] == [2, 2]
    for run in ours["runs"]:
        tried = [one for one in run["decisions"] if one.get("cost", {}).get("steps")]
        assert [one["step"] for one in tried] == [5], "the first boundary alone has trials"
    for run in adamw["runs"]:
        assert run["steps"] == 30
        assert 0 < run["curve"][0]["loss"] < 3.0, "a divergence: the cross-entropy of random tokens is above 4"
        assert 0 < run["loss"] < 3.0
    slow, fast = (one["loss"] for one in adamw["rates"])
    assert slow != fast


@pytest.mark.parametrize("words", [["model=tiny"], ["model=tiny_dba", "benchmark.benchmarks.0.models=[teacher]"]])
def test_distillation_needs_a_student_and_its_teacher(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"benchmark 'optimizers': objective=kl distils a student from its teacher"):
        freeze([*WORDS[1:], *words, f"+{TABLE}.objective=kl"])
