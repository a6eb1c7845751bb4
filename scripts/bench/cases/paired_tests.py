"""Measure the paired tests themselves: false rejections on equal models, and power against what is printed.

    python scripts/bench/run.py paired_tests --pairs 1000

Every simulated pair answers the same items, each item with its own difficulty, so that models agree more often than
chance. Equal models have equal chances on every item. Of clustered items, all of a cluster share a difficulty and a
part of what each model draws.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from caramba.artifacts.statistics import LEVEL, detectable_difference, holm, power, run_paired_test

if TYPE_CHECKING:
    from record import Record

N_ITEMS = 1838  # PIQA's validation set
MEAN_ACCURACY = 0.66
DIFFERENCES = (0.01, 0.02, 0.03)
CLUSTER_SIZE = 4
N_TASKS = 6
SEED = 20261124


OPTIONS = "--pairs=1000 --resamples=2000"  # pairs of models a row, and resamples of each bootstrap


def run(options: argparse.Namespace, record: Record) -> None:
    record.start()
    record.save(**simulate(options.pairs, options.resamples))
    for name, row in record.data["rows"].items():
        print(f"{name:<38} " + "  ".join(f"{key}={value:.4g}" for key, value in row.items()))


def simulate(n_pairs: int, resamples: int, seed: int = SEED) -> dict[str, Any]:
    """Return the rejection rates of all rows at level 5%, each with the standard error of a rate of `n_pairs`."""
    simulation = Simulation(np.random.default_rng(seed), n_pairs, resamples)
    rows = {
        "equal models, McNemar": simulation.rates(0.0),
        "equal models, NLL (bootstrap)": simulation.losses(),
        "equal models, clusters of 4 resampled": simulation.clusters(is_told=True),
        "equal models, clusters of 4 ignored": simulation.clusters(is_told=False),
        f"equal models, any of {N_TASKS} tasks, Holm": simulation.family(),
    }
    for difference in DIFFERENCES:
        rows[f"true difference {100 * difference:.0f} points"] = simulation.rates(difference)
    return {
        "n_items": N_ITEMS,
        "n_pairs": n_pairs,
        "resamples": resamples,
        "seed": seed,
        "level": LEVEL,
        "rate_is": "share of simulated pairs rejected; standard_error is that of a share of n_pairs",
        "rows": rows,
    }


@dataclass(frozen=True)
class Simulation:
    """Draws pairs of models and counts how often the test rejects."""

    generator: np.random.Generator
    n_pairs: int
    resamples: int

    def rates(self, difference: float) -> dict[str, float]:
        rejected, disagreements = 0, 0.0
        for pair in range(self.n_pairs):
            first, second = _pair(self.generator, difference)
            rejected += self.p_value(first, second, pair) <= LEVEL
            disagreements += float((first != second).mean())
        row = self.rate(rejected) | {"disagreement": disagreements / self.n_pairs}
        if difference:
            row["printed_power"] = power(N_ITEMS, difference, row["disagreement"])
            row["detectable_difference"] = detectable_difference(N_ITEMS, row["disagreement"]) or math.nan
        return row

    def losses(self) -> dict[str, float]:
        rejected = 0
        for pair in range(self.n_pairs):
            shared = self.generator.gamma(4.0, 0.7, size=256)  # windows
            first, second = shared + 0.1 * self.generator.standard_normal((2, 256))
            rejected += self.p_value(first, second, pair) <= LEVEL
        return self.rate(rejected)

    def clusters(self, *, is_told: bool) -> dict[str, float]:
        n_clusters = N_ITEMS // CLUSTER_SIZE
        n_items, size = n_clusters * CLUSTER_SIZE, CLUSTER_SIZE if is_told else 1
        names, rejected = [str(index // size) for index in range(n_items)], 0
        for pair in range(self.n_pairs):
            # What a model makes of a passage holds for all its questions.
            chances = np.clip(MEAN_ACCURACY + 0.25 * self.generator.standard_normal((2, n_clusters)), 0, 1)
            hits = self.generator.random((2, n_items)) < np.repeat(chances, CLUSTER_SIZE, axis=1)
            rejected += self.p_value(*hits.astype(np.int64), pair, names) <= LEVEL
        return self.rate(rejected)

    def family(self) -> dict[str, float]:
        rejected = 0
        for pair in range(self.n_pairs):
            values = {str(task): self.p_value(*_pair(self.generator, 0.0), pair) for task in range(N_TASKS)}
            rejected += min(holm(values).values()) <= LEVEL
        return self.rate(rejected)

    def p_value(self, first: np.ndarray, second: np.ndarray, seed: int, clusters: Any = None) -> float:
        given = (first.tolist(), second.tolist(), *(() if clusters is None else (clusters,)))
        return run_paired_test(*given, resamples=self.resamples, seed=seed).p_value

    def rate(self, rejected: int) -> dict[str, float]:
        rate = rejected / self.n_pairs
        return {"rate": rate, "standard_error": math.sqrt(max(rate * (1 - rate), 0.0) / self.n_pairs)}


def _pair(generator: np.random.Generator, difference: float) -> tuple[np.ndarray, np.ndarray]:
    """Draw the hits of two models; a hidden answer, which both mostly repeat, makes them agree as real models do."""
    shared = generator.random(N_ITEMS) < MEAN_ACCURACY
    redrawn = generator.random((2, N_ITEMS)) < 0.12
    fresh = generator.random((2, N_ITEMS)) < MEAN_ACCURACY
    first, second = np.where(redrawn, fresh, shared)
    # The second model gains `difference`: a share of its misses become hits.
    second = second | (generator.random(N_ITEMS) < difference / (1 - MEAN_ACCURACY))
    return first.astype(np.int64), second.astype(np.int64)
