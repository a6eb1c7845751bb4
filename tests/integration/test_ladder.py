"""The training ladder from the command line, on a CPU: every row that the device has, and why it lacks the others."""

from __future__ import annotations

import csv
import json
import statistics
from pathlib import Path

import pytest
import torch

from caramba.config.benchmark import top_of
from tests.integration.commands import SMALL, caramba, only_run

ROWS = "[baseline,tf32,bf16,flash,kernels,fused_adamw,fused_ce,full,largest_batch]"
LADDER = "benchmark.benchmarks.0.config"
TINY = {"batch_size": 2, "block_size": 32, "warmup_steps": 1, "timed_steps": 2, "loss_steps": 3}
MORE = {"most_batch": 1, "val_windows": 2}


def test_a_training_ladder_is_climbed_as_far_as_the_device_goes(tmp_path: Path, cache: Path) -> None:
    words = ["launch", "model=tiny", "train=none", "verify=none", "benchmark=ladder", *SMALL]
    words += ["model.topology.layers.0.repeat=1", f"{LADDER}.rows={ROWS}"]
    words += [f"{LADDER}.{key}={value}" for key, value in {**TINY, "twins": 1}.items()]
    words += [f"+{LADDER}.{key}={value}" for key, value in MORE.items()]
    done = caramba(words, tmp_path, cache, draws=True)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = only_run(tmp_path) / "artifacts"
    rows = {row["row"]: row for row in csv.DictReader((folder / "ladder.csv").open())}
    assert [name for name, row in rows.items() if row["skipped"]] == ["tf32", "kernels"]
    assert "the device cpu supports float32" in rows["tf32"]["skipped"]
    measured = [row for row in rows.values() if not row["skipped"]]
    figures = ("tok_s", "peak_bytes", "val_loss_delta")
    known = [{**row, **{key: float(row[key]) for key in figures if row[key]}} for row in measured]
    top = top_of(known, loss_tolerance=0.01)
    assert top is not None  # which row that is, the machine decides
    on = ["baseline", "bf16", "flash", "fused_adamw", "fused_ce"]
    left_out = [f"without_{name}" for name in on[1 : on.index(top["row"]) + 1]]
    assert list(rows)[list(rows).index("largest_batch") :] == ["largest_batch", "twin_1", *left_out]
    assert {rows[name]["of_row"] for name in ("twin_1", *left_out)} == {top["row"]}
    # A twin differs in rounding and draws alone.
    pair = (float(top["val_loss"]), float(rows["twin_1"]["val_loss"]))
    noise = float(rows["twin_1"]["loss_noise"])
    assert noise == pytest.approx(statistics.stdev(pair))
    assert 0.0 < noise < 5e-3
    assert float(rows["baseline"]["val_loss_delta"]) == 0.0
    # The same steps on the same data: what differs is rounding, of bfloat16 above all.
    exact = [float(rows[name]["val_loss"]) for name in ("bf16", "flash", "fused_adamw", "fused_ce", "full")]
    assert float(rows["baseline"]["val_loss"]) == pytest.approx(exact[0], abs=0.05)
    assert exact == pytest.approx([exact[0]] * 5, abs=5e-3)
    assert float(rows["baseline"]["val_loss"]) != exact[0]
    assert all(float(row["tok_s"]) > 0 and float(row["peak_bytes"]) > 0 for row in measured)
    assert rows["full"]["largest_ended"] == "most_batch"
    assert rows["full"]["largest_batch"] == rows["full"]["largest_trials"].strip("[]") == "1"
    assert rows["largest_batch"]["of_row"] in rows
    assert (folder / "ladder.png").stat().st_size > 10_000
    report = json.loads((folder / "report.json").read_text())
    given = "row=full,batch=2,accumulate=1,block=32"
    assert f"ladder.student.tok_s@{given}" in report["metrics"]
    table = (folder / "tables.tex").read_text()
    assert f"ladder.student.tok_s@{given}" in table
    assert "Loss noise (nats)" in table
    assert "Ended by" in table
    noise_key = "ladder.student.loss_noise@row=twin_1,batch=2,accumulate=1,block=32"
    assert report["metrics"][noise_key]["value"] == noise
    assert noise_key in table
    assert {"ladder.tf32: student, tf32", "ladder.kernels: student, kernels"} <= {
        item["name"] for item in report["omitted"]
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.slow
def test_a_gpu_climbs_every_row(tmp_path: Path, cache: Path) -> None:
    words = ["launch", "model=tiny", "train=none", "verify=none", "benchmark=ladder", *SMALL]
    given = {**TINY, "batch_size": 8, "block_size": 256, "warmup_steps": 3, "loss_steps": 8}
    words += [f"{LADDER}.{key}={value}" for key, value in given.items()]
    words += [f"+{LADDER}.most_batch=16", f"+{LADDER}.float8_min_width=128"]
    done = caramba(words, tmp_path, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = list(csv.DictReader((only_run(tmp_path) / "artifacts" / "ladder.csv").open()))
    skipped = {row["row"]: row["skipped"] for row in rows if row["skipped"]}
    assert set(skipped) <= {"fp8", "kernels"}, skipped  # which want torchao and Triton
    assert all(float(row["peak_allocated_bytes"]) > 0 for row in rows if row["val_loss"])
    assert all(float(row["loss_noise"]) >= 0 for row in rows if row["row"].startswith("twin_"))
    assert sum(row["row"].startswith("twin_") for row in rows) == 2
    assert all(abs(float(row["val_loss_delta"])) < 0.02 for row in rows if row["val_loss_delta"])
