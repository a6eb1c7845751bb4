"""Measure the paired tests themselves: false rejections on equal models, and power against what is printed.

    python scripts/paired_tests.py --pairs 1000 --out docs/benchmarks/paired_tests.json

Every simulated pair answers the same items, each item with its own difficulty, so that models agree more often than
chance. Equal models have equal chances on every item. Of clustered items, all of a cluster share a difficulty and a
part of what each model draws.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np

from caramba.artifacts.statistics import LEVEL, detectable_difference, holm, power, run_paired_test
from caramba.runs.files import write_json

N_ITEMS = 1838  # PIQA's validation set
MEAN_ACCURACY = 0.66
DIFFERENCES = (0.01, 0.02, 0.03)
CLUSTER_SIZE = 4
N_TASKS = 6
SEED = 20261124


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure rejection rates of the paired tests on simulated models."
    )
    parser.add_argument("--pairs", type=int, default=1000, help="simulated pairs of models a row")
    parser.add_argument("--resamples", type=int, default=2000, help="resamples of each bootstrap")
    parser.add_argument("--out", type=Path, help="JSON file; default: print only")
    words = parser.parse_args()
    record = simulate(words.pairs, words.resamples)
    for name, row in record["rows"].items():
        print(f"{name:<38} " + "  ".join(f"{key}={value:.4g}" for key, value in row.items()))
    if words.out is not None:
        write_json(words.out.absolute(), record)


def simulate(n_pairs: int, resamples: int, seed: int = SEED) -> dict[str, Any]:
    """Return the rejection rates of all rows at level 5%, each with the standard error of a rate of `n_pairs`."""
    generator = np.random.default_rng(seed)
    rows: dict[str, dict[str, float]] = {}
    rows["equal models, McNemar"] = _rates(generator, n_pairs, resamples, difference=0.0)
    rows["equal models, NLL (bootstrap)"] = _losses(generator, n_pairs, resamples)
    rows["equal models, clusters of 4 resampled"] = _clusters(generator, n_pairs, resamples, is_told=True)
    rows["equal models, clusters of 4 ignored"] = _clusters(generator, n_pairs, resamples, is_told=False)
    rows[f"equal models, any of {N_TASKS} tasks, Holm"] = _family(generator, n_pairs, resamples)
    for difference in DIFFERENCES:
        rows[f"true difference {100 * difference:.0f} points"] = _rates(
            generator, n_pairs, resamples, difference
        )
    return {
        "script": "scripts/paired_tests.py",
        "n_items": N_ITEMS,
        "n_pairs": n_pairs,
        "resamples": resamples,
        "seed": seed,
        "level": LEVEL,
        "rate_is": "share of simulated pairs rejected; standard_error is that of a share of n_pairs",
        "rows": rows,
    }


def _rates(
    generator: np.random.Generator, n_pairs: int, resamples: int, difference: float
) -> dict[str, float]:
    rejected, disagreements = 0, 0.0
    for pair in range(n_pairs):
        first, second = _pair(generator, difference)
        test = run_paired_test(first.tolist(), second.tolist(), resamples=resamples, seed=pair)
        rejected += test.p_value <= LEVEL
        disagreements += float((first != second).mean())
    row = _rate(rejected, n_pairs) | {"disagreement": disagreements / n_pairs}
    if difference:
        row["printed_power"] = power(N_ITEMS, difference, row["disagreement"])
        row["detectable_difference"] = detectable_difference(N_ITEMS, row["disagreement"]) or math.nan
    return row


def _pair(generator: np.random.Generator, difference: float) -> tuple[np.ndarray, np.ndarray]:
    """Draw the hits of two models; a hidden answer, which both mostly repeat, makes them agree as real models do."""
    shared = generator.random(N_ITEMS) < MEAN_ACCURACY
    redrawn = generator.random((2, N_ITEMS)) < 0.12
    fresh = generator.random((2, N_ITEMS)) < MEAN_ACCURACY
    first, second = np.where(redrawn, fresh, shared)
    # The second model gains `difference`: a share of its misses become hits.
    second = second | (generator.random(N_ITEMS) < difference / (1 - MEAN_ACCURACY))
    return first.astype(np.int64), second.astype(np.int64)


def _losses(generator: np.random.Generator, n_pairs: int, resamples: int) -> dict[str, float]:
    rejected = 0
    for pair in range(n_pairs):
        shared = generator.gamma(4.0, 0.7, size=256)  # windows
        first, second = shared + 0.1 * generator.standard_normal((2, 256))
        rejected += (
            run_paired_test(first.tolist(), second.tolist(), resamples=resamples, seed=pair).p_value <= LEVEL
        )
    return _rate(rejected, n_pairs)


def _clusters(
    generator: np.random.Generator, n_pairs: int, resamples: int, *, is_told: bool
) -> dict[str, float]:
    rejected = 0
    n_clusters = N_ITEMS // CLUSTER_SIZE
    names = [str(index // CLUSTER_SIZE) for index in range(n_clusters * CLUSTER_SIZE)]
    alone = [str(index) for index in range(len(names))]
    for pair in range(n_pairs):
        # What a model makes of a passage holds for all its questions.
        chances = np.clip(MEAN_ACCURACY + 0.25 * generator.standard_normal((2, n_clusters)), 0, 1)
        hits = generator.random((2, len(names))) < np.repeat(chances, CLUSTER_SIZE, axis=1)
        first, second = hits.astype(np.int64)
        clusters = names if is_told else alone
        test = run_paired_test(first.tolist(), second.tolist(), clusters, resamples=resamples, seed=pair)
        rejected += test.p_value <= LEVEL
    return _rate(rejected, n_pairs)


def _family(generator: np.random.Generator, n_pairs: int, resamples: int) -> dict[str, float]:
    rejected = 0
    for pair in range(n_pairs):
        values = {}
        for task in range(N_TASKS):
            first, second = _pair(generator, 0.0)
            test = run_paired_test(first.tolist(), second.tolist(), resamples=resamples, seed=pair)
            values[str(task)] = test.p_value
        rejected += min(holm(values).values()) <= LEVEL
    return _rate(rejected, n_pairs)


def _rate(rejected: int, n_pairs: int) -> dict[str, float]:
    rate = rejected / n_pairs
    return {"rate": rate, "standard_error": math.sqrt(max(rate * (1 - rate), 0.0) / n_pairs)}


if __name__ == "__main__":
    main()
