"""Products of quantised weights, the inference ladder, and one compiled step for all lengths, on tiny models."""

from __future__ import annotations

import copy
import csv
import json
from pathlib import Path

import pytest
import torch

from caramba import artifacts
from caramba.config.benchmark import BenchmarkConfig, CalibrationConfig, InferenceLadderConfig, WeightFormat
from caramba.errors import ConfigError
from caramba.evaluation import Subjects, ladder, run_suite
from caramba.infer import Generator, step_pool
from caramba.layer.quantized_linear import QuantizedLinear
from caramba.lower.quantize import DynamicLinear, Ranges, linear_layers, observe_ranges, quantise_weights
from caramba.model import build_model, model_hash
from caramba.model.model import model_bytes
from caramba.result import RunResult
from tests.needs import need
from tests.unit.model.model_specs import VOCAB, transformer

need("torchao")

CPU = torch.device("cpu")


def test_a_model_that_cannot_be_captured_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "missing_rungs", lambda *_: {})
    reason = "a layer keeps its first tokens at full precision"
    monkeypatch.setattr(step_pool, "choose_steps", lambda host: (host, "eager", reason))
    config = {"type": "inference_ladder", "prompt_length": 4, "new_tokens": 2, "timed_runs": 1}
    bench = InferenceLadderConfig.model_validate(config | {"rungs": ["flash", "graphs"]})
    model = build_model(transformer("standard"), seed=0)
    subjects = Subjects({"student": model}, lambda _: None, None, VOCAB, CPU)  # type: ignore[arg-type, return-value]
    metrics, rows = ladder.inference_ladder(bench, subjects, "ladder")
    assert [row.get("skipped") for row in rows] == [None, reason]
    assert {metric.key.partition("rung=")[2].partition(",")[0] for metric in metrics} == {"flash"}


def test_sums_of_codes_are_exact_whatever_their_size() -> None:
    source = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (24, 512), dtype=torch.int8, generator=source)
    codes[0] = 127
    scale, smoothing, bias = torch.rand(24), torch.rand(512) + 0.5, torch.randn(24)
    x = torch.randn(3, 5, 512, generator=source)
    x[0, 0] = smoothing  # codes of 127 alone: the largest sum
    x[1, 1] = 0
    rows = (x / smoothing).double().flatten(0, 1)
    step = rows.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    wanted = (rows / step).round() @ codes.double().T * step * scale + bias
    found = DynamicLinear(codes, scale, smoothing, bias)(x)
    # A quotient on the border of two codes may fall to either side: one code of one weight, at most.
    slack = 127 * step * scale + 1e-5
    assert ((found.flatten(0, 1) - wanted).abs() <= slack).all()
    torch.testing.assert_close(found[0, 0], wanted[0].float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(found[1, 1], bias)


def test_a_ladder_is_climbed_as_far_as_the_device_goes(tmp_path: Path) -> None:
    model = build_model(transformer("latent_gate"), seed=0)
    config = {"type": "inference_ladder", "prompt_length": 8, "new_tokens": 4, "timed_runs": 3}
    benches = [BenchmarkConfig.model_validate({"id": "ladder", "config": config})]
    subjects = Subjects({"student": model}, lambda _: None, None, VOCAB, CPU)  # type: ignore[arg-type, return-value]
    results = run_suite(benches, subjects)
    artifacts.write(RunResult("ladder", "run", "0" * 64, None, {}, {}, benchmarks=results), tmp_path)
    report = json.loads((tmp_path / "artifacts/report.json").read_text())
    rows = list(csv.DictReader((tmp_path / "artifacts/inference_ladder.csv").open()))
    assert [row["rung"] for row in rows] == ["eager_math", "flash", "graphs", "int8", "tp2"]
    assert [row["rung"] for row in rows if not row["skipped"]] == ["eager_math", "flash", "int8"]
    for row in rows:
        if not row["skipped"]:
            assert float(row["latency_ms_p20"]) <= float(row["latency_ms"]) <= float(row["latency_ms_p80"])
            assert float(row["tok_s"]) == pytest.approx(1000 / float(row["latency_ms"]), rel=1e-6)
    names = {item["name"]: item["reason"] for item in report["omitted"]}
    assert "need a CUDA device" in names["ladder: student, graphs"]
    assert "needs 2 devices, this process sees 1" in names["ladder: student, tp2"]
    assert (tmp_path / "artifacts/inference_ladder.png").stat().st_size > 10_000
    table = (tmp_path / "artifacts/tables.tex").read_text()
    assert "inference_ladder.student.tok_s@rung=int8" in table
    assert not any(key.startswith("ratio.") for key in report["metrics"])


@torch.inference_mode()
@pytest.mark.parametrize("name", ["gqa_scaled", "decoupled_gate", "latent_gate"])
def test_products_are_those_of_the_rounded_weights(name: str) -> None:
    model = build_model(transformer(name), seed=0).eval()
    tokens = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    wanted = model(tokens)
    int8, rounded = copy.deepcopy(model), copy.deepcopy(model)
    done = quantise_weights(int8, WeightFormat.INT8)
    for name, layer in linear_layers(rounded, WeightFormat.INT8, CPU).layers.items():
        weight, coded = layer.get_parameter("weight"), int8.get_submodule(name)
        assert isinstance(coded, QuantizedLinear)
        step = weight.abs().amax(1, keepdim=True) / 127.5
        plain = coded.weight * coded.scale[:, None]
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
        layer = model.get_submodule(name)
        assert isinstance(layer, DynamicLinear)
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


def test_compiled_steps_take_quantised_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = torch.compile
    monkeypatch.setattr(torch, "compile", lambda run, **values: inner(run, **values, backend="aot_eager"))
    model = build_model(transformer("gqa_scaled"), seed=0)
    quantise_weights(model, WeightFormat.INT8)
    plain = Generator(model, max_new_tokens=4, temperature=0.0)
    generator = Generator(model, compiled=True, max_new_tokens=4, temperature=0.0)
    assert generator.generate([[1, 2, 3]])[0].tokens == plain.generate([[1, 2, 3]])[0].tokens
    assert generator.stats.decode == "compiled"


@pytest.mark.parametrize("form", [WeightFormat.INT8, WeightFormat.INT8_DYNAMIC])
def test_codes_are_not_quantised_again(form: WeightFormat) -> None:
    model = build_model(transformer("gqa_scaled"), seed=0)
    quantise_weights(model, WeightFormat.INT8, with_head=True)
    ranges = Ranges({}, 64, CalibrationConfig())
    with pytest.raises(ConfigError, match=r"no linear layer .*\(head: it is of codes already\)"):
        quantise_weights(model, form, with_head=True, ranges=ranges)


def test_quantised_weights_have_an_identity_of_their_own() -> None:
    model = build_model(transformer("gqa_scaled"), seed=0)
    plain = model_hash(model)
    quantise_weights(model, WeightFormat.INT8)
    with torch.inference_mode():  # as a generator asks for it
        found = model_hash(model)
    assert model_hash(model) == found != plain
