"""Paired tests of two models on the same items: bootstrap, McNemar, clusters, Holm's correction and power.

Everything is two-sided. A difference is the second model's mean minus the first's, over the items that both have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, cast

from caramba.errors import CarambaError

LEVEL = 0.05  # rate of false rejections of one test
POWER = 0.8  # the power behind `detectable_difference`
DISAGREEMENT = 0.1  # share of items on which two models differ, where nothing has been measured yet
RESAMPLES = 10_000
_CHUNK = 2_000_000  # entries of a matrix of resampled counts


@dataclass(frozen=True)
class PairedTest:
    """A difference of two means over the same items, with its error, interval and p-value.

    `low` and `high` are the 95% percentile interval of the bootstrap and `standard_error` its deviation. `p_value` is
    McNemar's (mid-p) where every score is 0 or 1 and no items share a cluster, else the bootstrap's.
    """

    n: int
    n_clusters: int
    first: float
    second: float
    standard_error: float
    low: float
    high: float
    p_value: float
    test: str
    only_first: int | None = None
    only_second: int | None = None

    @property
    def difference(self) -> float:
        return self.second - self.first


def run_paired_test(
    first: Sequence[float],
    second: Sequence[float],
    clusters: Sequence[str] | None = None,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> PairedTest:
    """Compare two models by their scores of the same items in the same order.

    `clusters` names for each item the text that it shares with others; whole clusters are resampled then.

    Raises:
        CarambaError: the scores differ in number, are fewer than two, or are not finite.
    """
    _check_scores(first, second, clusters)
    errors, low, high, p_value, n_clusters = _bootstrap(first, second, clusters, resamples, seed)
    is_binary = all(score in (0, 1) for scores in (first, second) for score in scores)
    only_first = sum(a > b for a, b in zip(first, second, strict=True)) if is_binary else None
    only_second = sum(a < b for a, b in zip(first, second, strict=True)) if is_binary else None
    test = "bootstrap"
    if only_first is not None and only_second is not None and n_clusters == len(first):
        p_value, test = mcnemar(only_first, only_second), "McNemar"
    return PairedTest(
        len(first),
        n_clusters,
        math.fsum(first) / len(first),
        math.fsum(second) / len(second),
        errors,
        low,
        high,
        p_value,
        test,
        only_first,
        only_second,
    )


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the mid-p value of McNemar's test from the counts of items that only one model gets right.

    With n = only_first + only_second and k the smaller count, it is 2 P(X < k) + P(X = k) for X of Binomial(n, 1/2):
    the exact test without its excess of caution.
    """
    n, k = only_first + only_second, min(only_first, only_second)
    if n == 0:
        return 1.0

    def mass(count: int) -> float:
        log = math.lgamma(n + 1) - math.lgamma(count + 1) - math.lgamma(n - count + 1) - n * math.log(2)
        return math.exp(log)

    below = math.fsum(mass(count) for count in range(k))
    equal = mass(k)
    if 2 * k == n:  # both tails begin at k
        return 1.0
    return min(1.0, 2 * below + equal)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return the p-values adjusted for their number by Holm's step-down method, in the same order.

    Rejecting what is at most 0.05 then keeps the chance of any false rejection among all at 5%.
    """
    ordered = sorted(p_values, key=lambda name: p_values[name])
    adjusted: dict[str, float] = {}
    highest = 0.0
    for rank, name in enumerate(ordered):
        highest = max(highest, min(1.0, (len(ordered) - rank) * p_values[name]))
        adjusted[name] = highest
    return {name: adjusted[name] for name in p_values}


def power(n: int, difference: float, disagreement: float = DISAGREEMENT, level: float = LEVEL) -> float:
    """Return the chance that a paired test of n items with scores 0 and 1 rejects equality.

    `difference` is the true difference of the two shares and `disagreement` the share of items on which the models
    differ, at least as large. Normal approximation of the difference of two dependent shares (Connor 1987).
    """
    _check_power(n, disagreement)
    size = abs(difference)
    if size > disagreement:
        raise CarambaError(
            f"power: difference {difference:.4g} exceeds disagreement {disagreement:.4g}; models that differ so much "
            "disagree on at least as many items: raise disagreement"
        )
    normal = NormalDist()
    critical = normal.inv_cdf(1 - level / 2) * math.sqrt(disagreement)
    spread = math.sqrt(max(disagreement - size**2, 1e-12))
    shift = size * math.sqrt(n)
    return normal.cdf((shift - critical) / spread) + normal.cdf((-shift - critical) / spread)


def detectable_difference(
    n: int, disagreement: float = DISAGREEMENT, level: float = LEVEL, wanted: float = POWER
) -> float | None:
    """Return the smallest true difference that a paired test of n items sees with power `wanted`.

    None where no difference up to the disagreement is seen as often: there are too few items.
    """
    _check_power(n, disagreement)
    low, high = 0.0, disagreement
    if power(n, high, disagreement, level) < wanted:
        return None
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if power(n, middle, disagreement, level) < wanted else (low, middle)
    return high


def power_text(n: int, disagreement: float = DISAGREEMENT) -> str:
    """Return what a paired comparison on n items can see, in words, with the assumption behind it."""
    seen = detectable_difference(n, disagreement)
    given = f"(power {POWER:.0%}, level {LEVEL:.0%}, if two models differ on {disagreement:.0%} of items)"
    if seen is None:
        return f"{n:,} items: too few to see any difference {given}"
    return f"{n:,} items: can see {100 * seen:.1f} points {given}"


def _bootstrap(
    first: Sequence[float], second: Sequence[float], clusters: Sequence[str] | None, resamples: int, seed: int
) -> tuple[float, float, float, float, int]:
    """Return deviation, interval, p-value and number of clusters of the resampled mean difference.

    Clusters of equal size and sum are exchangeable, so their numbers are sampled, not the clusters one by one.
    """
    import numpy as np

    differences = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    if clusters is None:
        sums, sizes = differences, np.ones(len(differences))
    else:
        _, members = np.unique(np.asarray(clusters, dtype=np.str_), return_inverse=True)
        sums, sizes = np.bincount(members, weights=differences), np.bincount(members).astype(np.float64)
    n_clusters = len(sums)
    kinds, counts = cast("tuple[Any, Any]", np.unique(np.stack([sums, sizes], axis=1), axis=0, return_counts=True))
    generator = np.random.default_rng(seed)
    sampled: list[Any] = []
    chunk = max(1, _CHUNK // len(kinds))
    for begin in range(0, resamples, chunk):
        times = generator.multinomial(n_clusters, counts / n_clusters, size=min(chunk, resamples - begin))
        sampled.append((times @ kinds[:, 0]) / (times @ kinds[:, 1]))
    means = np.concatenate(sampled)
    low, high = (float(value) for value in np.quantile(means, (LEVEL / 2, 1 - LEVEL / 2)))
    # Sums of floats that cancel leave a rest that is no difference.
    rest = 1e-12 * max(1.0, float(np.abs(differences).max()))
    n_zero = int((np.abs(means) <= rest).sum())
    below, above = int((means < -rest).sum()), int((means > rest).sum())
    p_value = min(1.0, 2 * (min(below, above) + 0.5 * n_zero + 0.5) / (resamples + 1))
    return float(means.std(ddof=1)), low, high, p_value, n_clusters


def _check_scores(first: Sequence[float], second: Sequence[float], clusters: Sequence[str] | None) -> None:
    lengths = {len(first), len(second), *([] if clusters is None else [len(clusters)])}
    if len(lengths) > 1 or len(first) < 2:
        raise CarambaError(
            f"paired test: got {len(first)} and {len(second)} scores"
            f"{'' if clusters is None else f' and {len(clusters)} clusters'}; expected as many of each, at least two"
        )
    if not all(math.isfinite(score) for scores in (first, second) for score in scores):
        raise CarambaError("paired test: a score is not finite; leave out items without a score")


def _check_power(n: int, disagreement: float) -> None:
    if n < 1 or not 0 < disagreement <= 1:
        raise CarambaError(
            f"power: got n={n}, disagreement={disagreement}; expected at least one item and a share above 0, at most 1"
        )
