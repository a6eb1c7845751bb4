"""Quantised caches from the command line: formats side by side in one run's tables, and mistakes refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

from caramba.cli import main
from caramba.ops.backend import all_ops
from tests.integration.commands import SMALL, SMALL_TEACHER, caramba, only_run
from tests.needs import need

need("torchao")

pytestmark = pytest.mark.slow
CONFIG = "benchmark.benchmarks.{}.config"
FEW = (
    *(f"{CONFIG.format(number)}.num_batches=1" for number in (0, 1, 2, 3, 4, 8)),
    *(f"{CONFIG.format(number)}.{key}" for number in (5, 6) for key in ("prompt_lengths=[128]", "timed_runs=1")),
)
WORDS = ("benchmark=quantised", "verify=none", "train.steps=2", "train.batch_size=2", "train.block_size=64")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("quantised")
    done = caramba(["launch", *WORDS, *FEW, *SMALL, *SMALL_TEACHER], folder, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    return only_run(folder)


def test_formats_side_by_side(run: Path) -> None:
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
        assert set(ran["value"]) == set(all_ops())
    rows = list(csv.DictReader((run / "artifacts/memory.csv").open()))
    assert {row["kind"] for row in rows} == {"fp16", "q8_0", "q4_0", "nf4", "mixed"}
    assert all(float(row["tail_bytes"]) + float(row["slack_bytes"]) < float(row["cache_bytes"]) for row in rows)


def test_weights_are_reported_with_what_they_cost(run: Path) -> None:
    report = json.loads((run / "artifacts/report.json").read_text())
    metrics = {key: item["value"] for key, item in report["metrics"].items()}
    for model in ("teacher", "student"):
        assert metrics[f"weights.{model}.delta_nll@weights=bf16"] == 0
        for form in ("int8", "int8_dynamic"):
            assert 0 < abs(metrics[f"weights.{model}.delta_nll@weights={form}"]) < 0.01
            assert 1.6 < metrics[f"weights.{model}.bytes_ratio@weights={form}"] < 2
        assert 0 < abs(metrics[f"weights.{model}.delta_nll@weights=int4"]) < 0.1
        assert metrics[f"weights.{model}.bytes_ratio@weights=int4"] > 2
    assert not any(key.startswith("ratio.") and "weights=" in key for key in metrics)
    rows = list(csv.DictReader((run / "artifacts/weights.csv").open()))
    assert not any(row.get("skipped") for row in rows)
    assert "weights.student.ppl_ratio@weights=int8_dynamic" in (run / "artifacts/tables.tex").read_text()


def test_generate_takes_quantised_weights(
    run: Path,
    cache: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("CARAMBA_HOME", str(cache))
    words = ["generate", str(run), "--prompt", "def", "--max-new-tokens", "4", "--device", "cpu"]
    percentile = ("--weights-calibration-method", "percentile", "--weights-calibration-tokens", "100")
    for options in (("int8", "--weights-head"), ("int4", "--weights-head"), ("int8_dynamic", *percentile)):
        assert main([*words, "--json", "--weights", *options]) == 0
        found = json.loads(capsys.readouterr().out)["weights"]
        assert found["weights"] == options[0]
        assert found["bytes_after"] < 0.4 * found["bytes_before"]
        assert found["calibration_tokens"] == (100 if options[0] == "int8_dynamic" else 0)
    speculated = [*words, "--json", "--spec-method", "lookup", "--weights"]
    for option, is_said in (("int8", False), ("int8_dynamic", True)):
        assert main([*speculated, option]) == 0
        assert ("the text may be another than without speculation" in capsys.readouterr().err) is is_said
    text = tmp_path / "empty.txt"
    text.write_text("")
    for options, reason in (
        (("--weights", "int8", "--weights-text", "x"), "ranges are of --weights int8_dynamic, got int8"),
        (("--weights", "int8_dynamic", "--weights-text", str(text)), "no text to take ranges from"),
        (("--weights-head",), "--weights-head is of quantised weights"),
        (
            ("--weights", "int8_dynamic", "--weights-calibration-tokens", "0"),
            "--weights-calibration: tokens: got 0",
        ),
    ):
        assert main([*words, *options]) == 2
        captured = capsys.readouterr()
        assert reason in captured.out + captured.err


def test_what_would_measure_nothing_is_refused_before_the_run(tmp_path: Path) -> None:
    words = [*WORDS, "benchmark.benchmarks.1.config.block_size=128"]
    done = caramba(["launch", *words], tmp_path, tmp_path / "cache")
    assert done.returncode == 2
    assert "fits the 16-bit tail" in done.stderr + done.stdout
    done = caramba(["launch", *WORDS, "benchmark.benchmarks.1.config.cache_kind=auto"], tmp_path, tmp_path / "cache")
    assert done.returncode == 2
    assert "cache_kind: got auto, which chooses a format" in done.stderr + done.stdout
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
