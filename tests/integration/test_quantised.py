"""Quantised caches from the command line: formats side by side in one run's tables, and mistakes refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

from caramba.ops.backend import OPS
from tests.integration.commands import SMALL, SMALL_TEACHER, caramba, only_run

pytestmark = pytest.mark.slow
WORDS = ("benchmark=quantised", "verify=none", "train.steps=2", "train.batch_size=2", "train.block_size=64")


def test_formats_side_by_side(tmp_path: Path) -> None:
    done = caramba(["launch", *WORDS, *SMALL, *SMALL_TEACHER], tmp_path, tmp_path / "cache")
    assert done.returncode == 0, done.stdout + done.stderr
    run = only_run(tmp_path)
    metrics = json.loads((run / "artifacts/report.json").read_text())["metrics"]
    for model in ("teacher", "student"):
        plain = metrics[f"perplexity.{model}.nll"]["value"]
        for kind in ("q8_0", "q4_0", "nf4", "mixed"):
            found = metrics[f"perplexity.{model}.nll@kind={kind}"]["value"]
            assert 0 < abs(found - plain) < 0.05, (model, kind)
        assert metrics[f"latency.{model}.itl_ms@prompt=128,gen=16,batch=1,kind=mixed"]["value"] > 0
    assert metrics["memory.teacher.kv_bytes_per_token_layer@seq=1024,kind=q4_0"]["value"] == 72
    assert metrics["ratio.perplexity@kind=mixed"]["value"] > 0
    decided = json.loads((run / "plan.json").read_text())
    for phase in decided.values():
        ran = phase["decisions"]["kernels"]
        assert ran["reason"].startswith("kernels=auto: what was attached for")
        assert set(ran["value"]) == set(OPS)
    rows = list(csv.DictReader((run / "artifacts/memory.csv").open()))
    assert {row["kind"] for row in rows} == {"fp16", "q8_0", "q4_0", "nf4", "mixed"}
    assert all(
        float(row["tail_bytes"]) + float(row["slack_bytes"]) < float(row["cache_bytes"]) for row in rows
    )


def test_what_would_measure_nothing_is_refused_before_the_run(tmp_path: Path) -> None:
    words = [*WORDS, "benchmark.benchmarks.1.config.block_size=128"]
    done = caramba(["launch", *words], tmp_path, tmp_path / "cache")
    assert done.returncode == 2
    assert "fits the 16-bit tail" in done.stderr + done.stdout
    done = caramba(
        ["launch", *WORDS, "benchmark.benchmarks.1.config.cache_kind=auto"], tmp_path, tmp_path / "cache"
    )
    assert done.returncode == 2
    assert "cache_kind=auto is not built yet: it comes with the inference work" in done.stderr + done.stdout
    assert not list(tmp_path.glob("runs/*/*"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="has kernels")
def test_require_is_refused_where_there_are_no_kernels(tmp_path: Path) -> None:
    done = caramba(["launch", *WORDS, "kernels=require"], tmp_path, tmp_path / "cache")
    assert done.returncode == 2
    assert "kernels: require on cpu" in done.stderr + done.stdout
    assert "there are no kernels for cpu; use kernels: auto" in " ".join((done.stderr + done.stdout).split())


def test_doctor_says_which_implementation_the_ops_run(tmp_path: Path) -> None:
    done = caramba(["doctor"], tmp_path, tmp_path / "cache")
    (line,) = (line for line in done.stdout.splitlines() if line.strip().startswith("kernels"))
    assert "quantize" in line
    assert "dequantize" in line
    assert "op call on the host" in done.stdout
