"""Paired tests against closed forms, enumerations and simulated models."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from caramba.artifacts.items import TaskItems, compare_items
from caramba.artifacts.metrics import describe_dispersion, is_standard_error, standard_error
from caramba.artifacts.statistics import (
    LEVEL,
    detectable_difference,
    holm,
    mcnemar,
    power,
    power_text,
    run_paired_test,
)
from caramba.errors import CarambaError
from caramba.result import Metric


@pytest.mark.parametrize(("b", "c"), [(0, 0), (0, 5), (3, 7), (6, 6), (2, 9)])
def test_mcnemar_equals_enumeration_of_every_outcome(b: int, c: int) -> None:
    n, k = b + c, min(b, c)
    outcomes = [sum(bits) for bits in itertools.product((0, 1), repeat=n)]
    lower = sum(count < k for count in outcomes) + 0.5 * sum(count == k for count in outcomes)
    assert mcnemar(b, c) == pytest.approx(min(1.0, 2 * lower / len(outcomes)))
    assert mcnemar(b, c) == mcnemar(c, b)


def test_paired_test_error_and_interval_equal_the_normal_formula() -> None:
    generator = np.random.default_rng(3)
    first = generator.normal(size=2000)
    second = first + 0.05 + 0.2 * generator.normal(size=2000)
    test = run_paired_test(first.tolist(), second.tolist())
    error = (second - first).std(ddof=1) / math.sqrt(2000)
    assert test.standard_error == pytest.approx(error, rel=0.03)
    assert test.low == pytest.approx(test.difference - 1.96 * error, abs=0.15 * error)
    assert test.high == pytest.approx(test.difference + 1.96 * error, abs=0.15 * error)
    assert test.test == "bootstrap"
    assert test.only_first is None


def test_paired_test_of_hits_counts_both_sides_and_tests_by_mcnemar() -> None:
    first, second = [1, 1, 0, 0, 1, 1], [1, 0, 1, 0, 0, 0]
    test = run_paired_test(first, second)
    assert (test.only_first, test.only_second) == (3, 1)
    assert test.p_value == mcnemar(3, 1)
    assert test.difference == pytest.approx(-1 / 3)


def test_paired_test_clusters_widen_the_interval_by_what_items_share() -> None:
    generator = np.random.default_rng(5)
    shift = np.repeat(generator.normal(size=100), 20)  # the whole difference belongs to the cluster
    clusters = [str(index // 20) for index in range(2000)]
    first = generator.normal(size=2000)
    alone = run_paired_test(first.tolist(), (first + shift).tolist())
    told = run_paired_test(first.tolist(), (first + shift).tolist(), clusters)
    assert told.n_clusters == 100
    assert told.standard_error / alone.standard_error == pytest.approx(math.sqrt(20), rel=0.1)


def test_paired_test_of_a_model_with_itself_finds_nothing() -> None:
    test = run_paired_test([0.1, 0.7, 0.2], [0.1, 0.7, 0.2])
    assert (test.difference, test.low, test.high, test.p_value) == (0, 0, 0, 1)


@pytest.mark.parametrize(
    ("first", "second", "clusters"),
    [([1, 0], [1], None), ([1], [1], None), ([1, 0], [0, 1], ["a"]), ([1, math.nan], [0, 1], None)],
)
def test_paired_test_refuses_scores_that_do_not_pair(first, second, clusters) -> None:
    with pytest.raises(CarambaError, match="paired test"):
        run_paired_test(first, second, clusters)


def test_holm_equals_the_published_procedure() -> None:
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert adjusted == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02})
    assert list(adjusted) == ["a", "b", "c", "d"]
    assert holm({"one": 0.9, "two": 0.8})["one"] == 1.0


def test_power_rises_with_items_and_detectable_difference_inverts_it() -> None:
    seen = detectable_difference(1838, 0.1)
    assert seen is not None
    assert power(1838, seen, 0.1) == pytest.approx(0.8, abs=1e-6)
    assert power(1838, 0.0, 0.1) == pytest.approx(0.05, abs=1e-6)
    assert power(10042, 0.02, 0.1) > power(1838, 0.02, 0.1) > power(500, 0.02, 0.1)
    assert detectable_difference(10, 0.1) is None
    assert power_text(1838).startswith(f"1,838 items: can see {100 * seen:.1f} points")
    assert "too few" in power_text(10)


@pytest.mark.parametrize(("n", "disagreement"), [(0, 0.1), (5, 0.0), (5, 1.5)])
def test_power_refuses_what_is_no_sample(n: int, disagreement: float) -> None:
    with pytest.raises(CarambaError, match="power: got"):
        power(n, 0.01, disagreement)
    with pytest.raises(CarambaError, match="raise disagreement"):
        power(10, 0.5, 0.1)


def items(scores: list[float], texts: list[str], clusters: list[str] | None = None) -> TaskItems:
    ids = tuple(str(index) for index in range(len(scores)))
    return TaskItems(ids, tuple(texts), tuple(clusters or ids), tuple(scores))


def test_compare_items_pairs_equal_texts_only_and_adjusts_over_tasks() -> None:
    ours = {("a", "acc"): items([1, 0, 1, 1], list("wxyz")), ("b", "acc"): items([1, 1], list("pq"))}
    theirs = {("a", "acc"): items([0, 0, 0, 1], list("wxy!")), ("b", "acc"): items([0, 0], list("pq"))}
    found = {item.task: item for item in compare_items(ours, theirs)}
    assert found["a"].test.n == 3
    assert found["a"].unpaired == 2
    assert found["a"].test.first == pytest.approx(2 / 3)
    assert found["b"].adjusted_p == pytest.approx(min(1.0, 2 * found["b"].test.p_value))


def simulate_hits(generator: np.random.Generator, difference: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the hits of two models on PIQA's number of items, the second better by a share of them.

    A hidden answer, which both mostly repeat, makes them agree as real models do.
    """
    n_items, accuracy = 1838, 0.66
    shared, fresh = generator.random(n_items) < accuracy, generator.random((2, n_items)) < accuracy
    first, second = np.where(generator.random((2, n_items)) < 0.12, fresh, shared)
    return first, second | (generator.random(n_items) < difference / (1 - accuracy))


def test_simulated_models_are_told_apart_as_often_as_the_level_and_the_power_say() -> None:
    generator, n_pairs = np.random.default_rng(0), 100
    rates, disagreements = {}, []
    for difference in (0.0, 0.03):
        rejected = 0
        for pair in range(n_pairs):
            first, second = simulate_hits(generator, difference)
            test = run_paired_test(first.astype(int).tolist(), second.astype(int).tolist(), resamples=500, seed=pair)
            rejected += test.p_value <= LEVEL
            disagreements += [float((first != second).mean())] if difference else []
        rates[difference] = rejected / n_pairs
    assert rates[0.0] <= 0.13
    assert rates[0.03] == pytest.approx(power(1838, 0.03, float(np.mean(disagreements))), abs=0.1)


def test_committed_simulation_is_within_its_bounds() -> None:
    import json

    path = Path(__file__).parents[3] / "docs" / "benchmarks" / "paired_tests.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["n_pairs"] >= 1000
    rows = record["rows"]
    assert 0.035 <= rows["equal models, McNemar"]["rate"] <= 0.065
    assert 0.035 <= rows["equal models, NLL (bootstrap)"]["rate"] <= 0.065
    assert 0.035 <= rows["equal models, clusters of 4 resampled"]["rate"] <= 0.065
    assert rows["true difference 2 points"]["rate"] == pytest.approx(
        rows["true difference 2 points"]["printed_power"], abs=0.05
    )


def test_dispersion_is_named_by_metric() -> None:
    old = Metric("perplexity.student.nll", 2.0, "nats/token", 64, 0.1)
    loss = Metric("perplexity.student.nll", 2.0, "nats/token", 64, None, "", 0.1)
    speed = Metric("latency.student.tok_s@prompt=8", 100.0, "tokens/s", 4, 2.0)
    assert describe_dispersion([]) == ""
    assert describe_dispersion([loss]) == " ± is the standard error of the mean over n items."
    assert describe_dispersion([speed]) == " ± is the standard deviation of n samples."
    assert describe_dispersion([loss, speed]).endswith("; of tok_s the standard deviation of n samples.")
    assert describe_dispersion([old]) == describe_dispersion([loss])
    assert standard_error(old.key, old.std, old.n) == 0.1
    assert standard_error(speed.key, speed.std, speed.n) == 1.0
    assert is_standard_error("main/controls.copy.ppl_ratio")
    assert not is_standard_error("ratio.tok_s@prompt=8")
