"""Metrics of a run: measured, verified, and student over teacher."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Callable

import pytest

from caramba.artifacts.metrics import collect, find_undefined_ratios, headline
from caramba.artifacts.rows import to_csv
from caramba.errors import CarambaError
from caramba.evaluation.perplexity import summarise
from caramba.infer.nll import WindowedNLL
from caramba.result import WINDOW_NLL, BenchmarkResult, Check, Metric, RunResult, Verdict


def bench(ident: str, *metrics: tuple[str, float, float | None]) -> BenchmarkResult:
    built = tuple(Metric(key, value, "u", 3, std, ident) for key, value, std in metrics)
    return BenchmarkResult(ident, built[0].key.split(".")[0], built)


def with_benches(result: RunResult, *benches: BenchmarkResult) -> RunResult:
    return dataclasses.replace(result, benchmarks=benches, verdicts=())


def test_all_families_are_there_and_ratios_divide_student_by_teacher(result: RunResult) -> None:
    metrics = collect(result)
    assert all(metrics[key] == metric for key, metric in result.metrics.items())
    assert metrics["verify.fidelity.delta_nll"].value == 0.041
    assert metrics["verify.fidelity.delta_nll"].unit == "nats"
    assert metrics["ratio.perplexity"].value == pytest.approx(math.exp(2.342 - 2.301), rel=1e-6)
    assert metrics["ratio.tok_s@prompt=128,gen=32,batch=1"].value == pytest.approx(1 / 0.82)
    assert metrics["ratio.kv_bytes_per_token@seq=256,kind=q8_0"].value == 0.375
    stage = metrics["ratio.perplexity@model=teacher_continued"]
    assert stage.value == pytest.approx(math.exp(2.214 - 2.301), rel=1e-6)
    assert stage.source == "perplexity.teacher_continued.perplexity / perplexity.teacher.perplexity"
    assert not any(key.startswith("ratio.unique_tokens") for key in metrics)


def test_the_error_of_a_ratio_is_that_of_simulated_measurements(result: RunResult) -> None:
    metric = collect(with_benches(result, bench("b", ("a.teacher.x", 20.0, 0.4), ("a.student.x", 30.0, 0.9))))[
        "ratio.x"
    ]
    draw = random.Random(0)
    samples = [draw.gauss(30.0, 0.9) / draw.gauss(20.0, 0.4) for _ in range(20_000)]
    mean = math.fsum(samples) / len(samples)
    deviation = math.sqrt(math.fsum((sample - mean) ** 2 for sample in samples) / len(samples))
    assert metric.spread == pytest.approx(deviation, rel=0.03)


def test_a_ratio_has_no_error_when_one_side_has_none(result: RunResult) -> None:
    metrics = collect(with_benches(result, bench("b", ("a.teacher.x", 2.0, None), ("a.student.x", 3.0, 1.0))))
    assert metrics["ratio.x"].spread is None


def test_a_ratio_over_zero_is_left_out_with_its_reason(result: RunResult) -> None:
    run = with_benches(result, bench("b", ("a.teacher.x@seq=1", 0.0, None), ("a.student.x@seq=1", 3.0, None)))
    assert list(collect(run)) == ["a.teacher.x@seq=1", "a.student.x@seq=1"]
    assert [(item.key, item.reason) for item in find_undefined_ratios(run)] == [
        ("ratio.x@seq=1", "a.teacher.x@seq=1 is 0")
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused_by_key(result: RunResult, value: float) -> None:
    with pytest.raises(CarambaError, match=r"perplexity\.student\.perplexity.*not finite"):
        collect(with_benches(result, bench("p", ("perplexity.student.perplexity", value, None))))
    with pytest.raises(CarambaError, match=r"perplexity\.student\.nll.*not finite"):
        collect(with_benches(result, bench("p", ("perplexity.student.nll", 1.0, value))))


def test_a_second_benchmark_of_the_same_keys_is_told_apart_whole(result: RunResult) -> None:
    key = "perplexity.{}.perplexity"
    first = bench("short", (key.format("teacher"), 10.0, None), (key.format("student"), 11.0, None))
    second = bench("long run", (key.format("teacher"), 8.0, None), (key.format("student"), 8.4, None))
    metrics = collect(with_benches(result, first, second))
    assert metrics["perplexity.teacher.perplexity"].value == 10.0
    assert metrics["perplexity.student.perplexity@bench=long_run"].value == 8.4
    assert metrics["ratio.perplexity"].value == pytest.approx(1.1)
    assert metrics["ratio.perplexity@bench=long_run"].value == pytest.approx(1.05)
    with pytest.raises(CarambaError, match="distinct ids"):
        collect(with_benches(result, first, second, bench("long run", (key.format("teacher"), 7.0, None))))


def test_only_the_last_verdict_of_a_type_keeps_the_plain_key(result: RunResult) -> None:
    verdicts = (
        Verdict("compare", "block_0", (Check("l1", 0.5, 1.0),)),
        Verdict("compare", "global_0", (Check("l1", 0.2, 1.0),)),
    )
    metrics = collect(dataclasses.replace(result, verdicts=verdicts))
    assert metrics["verify.compare.l1"].value == 0.2
    assert metrics["verify.compare.l1@run=block_0"].value == 0.5


def test_headline_shares_conditions_and_counts_kv_bytes_at_16_bits(result: RunResult) -> None:
    metrics = collect(result)
    speed = headline(metrics, "latency", "tok_s")
    assert {metric.key.partition("@")[2] for metric in speed.values()} == {"prompt=1024,gen=32,batch=1"}
    assert headline(metrics, "memory", "kv_bytes_per_token")["student"].key.endswith("@seq=4096,kind=fp16")
    quantised = {key: metric for key, metric in metrics.items() if "kind=fp16" not in key}
    assert headline(quantised, "memory", "kv_bytes_per_token") == {}
    lonely = {key: metric for key, metric in metrics.items() if not ("prompt=1024" in key and ".student." in key)}
    assert set(headline(lonely, "latency", "tok_s")) == {"teacher", "student"}
    assert headline(lonely, "latency", "tok_s")["teacher"].key.endswith("@prompt=512,gen=32,batch=1")


def test_the_error_of_a_ratio_on_the_same_windows_is_that_of_their_differences(result: RunResult) -> None:
    """What both models find hard is no doubt about their ratio: hard and easy windows cancel."""
    draw = random.Random(1)
    hard = [draw.gauss(3.0, 0.5) for _ in range(64)]
    means = {"teacher": hard, "student": [value + draw.gauss(0.04, 0.02) for value in hard]}
    metrics, rows = [], []
    for model, found in means.items():
        measured = WindowedNLL(sum(found) * 128, 64 * 128, tuple(found))
        for field, (value, unit, error) in summarise(measured, 20_000).items():
            metrics.append(Metric(f"perplexity.{model}.{field}", value, unit, 64, None, "ppl", error))
        rows.append({"model": model, WINDOW_NLL: found})
    both = BenchmarkResult("ppl", "perplexity", tuple(metrics), tuple(rows))
    got = collect(with_benches(result, both))

    def resampled(ratio: Callable[[float, float], float]) -> float:
        values = []
        for _ in range(4000):
            picked = draw.choices(range(64), k=64)
            t, s = (sum(means[model][at] for at in picked) / 64 for model in ("teacher", "student"))
            values.append(ratio(s, t))
        return statistics.stdev(values)

    for field, ratio in (
        ("perplexity", lambda s, t: math.exp(s - t)),
        ("nll", lambda s, t: s / t),
        ("bits_per_byte", lambda s, t: s / t),
    ):
        assert got[f"ratio.{field}"].standard_error == pytest.approx(resampled(ratio), rel=0.1), field
    apart, paired = got["perplexity.student.nll"].standard_error, got["ratio.perplexity"].standard_error
    assert apart is not None
    assert paired is not None
    assert apart > 10 * paired
    others = dataclasses.replace(both, rows=({**rows[0], WINDOW_NLL: hard[:-1]}, rows[1]))
    assert collect(with_benches(result, others))["ratio.perplexity"].standard_error is None


def test_losses_of_windows_are_in_no_csv(result: RunResult) -> None:
    rows = ({"repeat": 0, "model": "teacher", "nll": 2.5, WINDOW_NLL: [2.0, 3.0]},)
    text = to_csv(with_benches(result, BenchmarkResult("ppl", "perplexity", (), rows)), "perplexity")
    assert text == "benchmark,repeat,model,nll\nppl,0,teacher,2.5\n"
