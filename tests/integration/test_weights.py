"""Quantised weights, the inference ladder and reused compiled steps from the command line, on a tiny trained pair."""

from __future__ import annotations

import copy
import csv
import json
from pathlib import Path

import pytest

pytest.importorskip("torchao")

import torch

from caramba.cli import main
from caramba.config.quantise import CalibrationConfig, WeightFormat
from caramba.infer import Generator
from caramba.measure import model_bytes
from caramba.model import build_model
from caramba.quantise import Ranges, observe_ranges, quantise_weights
from caramba.quantise.weights import linear_layers
from tests.integration.commands import SMALL, caramba, only_run
from tests.unit.model.model_specs import VOCAB, transformer

WORDS = (
    *("model=tiny", "train=pretrain", "benchmark=weights", "verify=none"),
    *("train.steps=2", "train.batch_size=2", "train.block_size=64"),
)
LADDER = {
    "type": "inference_ladder",
    "prompt_length": 8,
    "new_tokens": 4,
    "timed_runs": 3,
}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that measured both benchmarks; the tests of this module share its cache of tokens."""
    folder = tmp_path_factory.mktemp("weights")
    ladder = "{id: ladder, config: {" + ", ".join(f"{key}: {value}" for key, value in LADDER.items()) + "}}"
    formats = "{id: weights, config: {type: weights, block_size: 64, batch_size: 4, num_batches: 2}}"
    words = [*WORDS, f"benchmark.benchmarks=[{formats}, {ladder}]", *SMALL]
    done = caramba(["launch", *words], folder, folder / "cache")
    assert done.returncode == 0, done.stdout + done.stderr
    return only_run(folder)


@pytest.mark.slow
def test_formats_and_rungs_are_reported_with_what_they_cost(run: Path) -> None:
    report = json.loads((run / "artifacts/report.json").read_text())
    metrics = {key: item["value"] for key, item in report["metrics"].items()}
    assert metrics["weights.student.delta_nll@weights=bf16"] == 0
    for form in ("int8", "int8_dynamic"):
        assert 0 < abs(metrics[f"weights.student.delta_nll@weights={form}"]) < 0.01
        assert 1.6 < metrics[f"weights.student.bytes_ratio@weights={form}"] < 2
    assert not any(key.startswith("ratio.") for key in metrics)
    rows = list(csv.DictReader((run / "artifacts/weights.csv").open()))
    (refused,) = (row for row in rows if (row["model"], row["weights"]) == ("student", "int4"))
    assert "needs a CUDA device" in refused["skipped"] or torch.cuda.is_available()
    rows = list(csv.DictReader((run / "artifacts/inference_ladder.csv").open()))
    climbed = {row["rung"] for row in rows if not row["skipped"]}
    assert {"eager_math", "flash", "int8"} <= climbed
    for row in rows:
        if row["rung"] in climbed:
            assert float(row["latency_ms_p20"]) <= float(row["latency_ms"]) <= float(row["latency_ms_p80"])
            assert float(row["tok_s"]) == pytest.approx(1000 / float(row["latency_ms"]), rel=1e-6)
    names = {item["name"]: item["reason"] for item in report["omitted"]}
    assert "2 devices" in names["ladder: student, tp2"] or torch.cuda.device_count() > 1
    assert (run / "artifacts/inference_ladder.png").stat().st_size > 10_000
    tables = (run / "artifacts/tables.tex").read_text()
    assert "inference_ladder.student.tok_s@rung=int8" in tables
    assert "weights.student.ppl_ratio@weights=int8_dynamic" in tables


@pytest.mark.slow
def test_generate_takes_quantised_weights(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CARAMBA_HOME", str(run.parents[2] / "cache"))
    words = ["generate", str(run), "--prompt", "def", "--max-new-tokens", "4", "--device", "cpu"]
    percentile = ("--weights-calibration-method", "percentile", "--weights-calibration-tokens", "100")
    for options in (("int8", "--weights-head"), ("int8_dynamic", *percentile)):
        assert main([*words, "--json", "--weights", *options]) == 0
        found = json.loads(capsys.readouterr().out)["weights"]
        assert found["weights"] == options[0]
        assert found["bytes_after"] < 0.4 * found["bytes_before"]
        assert found["calibration_tokens"] == (100 if options[0] == "int8_dynamic" else 0)
    text = tmp_path / "empty.txt"
    text.write_text("")
    for options, reason in (
        (("--weights", "int4"), "needs a CUDA device, the model is on cpu; use weights=int8"),
        (("--weights", "int8", "--weights-text", "x"), "ranges are of --weights int8_dynamic, got int8"),
        (("--weights", "int8_dynamic", "--weights-text", str(text)), "no text to take ranges from"),
        (("--weights-head",), "--weights-head is of quantised weights"),
    ):
        assert main([*words, *options]) == 2
        captured = capsys.readouterr()
        assert reason in captured.out + captured.err


@torch.inference_mode()
@pytest.mark.parametrize("name", ["gqa_scaled", "decoupled_gate", "latent_gate"])
def test_products_are_those_of_the_rounded_weights(name: str) -> None:
    model = build_model(transformer(name), seed=0).eval()
    tokens = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    wanted = model(tokens)
    int8, rounded = copy.deepcopy(model), copy.deepcopy(model)
    done = quantise_weights(int8, WeightFormat.INT8)
    for name, layer in linear_layers(rounded, WeightFormat.INT8, CPU).layers.items():
        weight, codes = layer.get_parameter("weight"), int8.get_submodule(name).get_parameter("weight")
        step = weight.abs().amax(1, keepdim=True) / 127.5
        plain = codes.dequantize()
        # Half a step; a row's largest value is at a tie, and the codes end at 127.
        assert ((plain - weight).abs() <= 0.501 * step).all()
        weight.copy_(plain)
    torch.testing.assert_close(int8(tokens), rounded(tokens), rtol=1e-4, atol=1e-5)
    assert len(done.layers) >= 14
    assert (done.bytes_before, done.bytes_after) == (model_bytes(model), model_bytes(int8))
    errors = {}
    for method in ("max", "percentile"):
        dynamic = copy.deepcopy(model)
        found = linear_layers(dynamic, WeightFormat.INT8_DYNAMIC, CPU)
        config = CalibrationConfig.model_validate({"method": method})
        ranges = observe_ranges(dynamic, found.layers, list(tokens), config)
        quantise_weights(dynamic, WeightFormat.INT8_DYNAMIC, ranges=ranges)
        errors[method] = float((dynamic(tokens) - wanted).norm() / wanted.norm())
    assert 1e-4 < max(errors.values()) < 0.03, errors


@torch.inference_mode()
def test_ranges_save_a_layer_that_reads_an_outlying_channel() -> None:
    def error(is_ranged: bool) -> float:
        model = build_model(transformer("standard"), seed=0).eval()
        found = linear_layers(model, WeightFormat.INT8_DYNAMIC, CPU).layers
        name, layer = next(iter(found.items()))
        weight = layer.get_parameter("weight")
        x = torch.randn(64, weight.shape[1], generator=torch.Generator().manual_seed(1))
        x[:, 3] *= 200
        weight[:, 3] /= 200
        wanted = layer(x)
        of = {name: module.get_parameter("weight").abs().amax(0) for name, module in found.items()}
        if is_ranged:  # ranges equal to those of the weights would leave everything where it is
            of[name] = x.abs().amax(0)
        quantise_weights(model, WeightFormat.INT8_DYNAMIC, ranges=Ranges(of, 64, CalibrationConfig()))
        return float((layer(x) - wanted).norm() / wanted.norm())

    assert error(True) < 0.1 * error(False)


def test_one_compilation_serves_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = torch.compile
    monkeypatch.setattr(torch, "compile", lambda run, **values: inner(run, **values, backend="eager"))
    model = build_model(transformer("latent_gate"), seed=0)
    generator = Generator(model, compiled=True, max_new_tokens=3, temperature=0.0)
    first = generator.generate([[1, 2, 3]])
    assert generator.stats.compilations == 1
    for prompt in ([4], [5] * 600, [6] * 1100, [1, 2, 3]):  # buckets of 512, 1024, 2048 and again 512
        found = generator.generate([prompt])
        assert (generator.stats.decode, generator.stats.compilations) == ("compiled", 0)
    assert [row.tokens for row in found] == [row.tokens for row in first]
    other = Generator(model, compiled=True, max_new_tokens=5, temperature=0.0)
    other.generate([[3]])
    assert other.stats.compilations == 0
