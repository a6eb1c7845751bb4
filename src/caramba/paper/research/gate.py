"""The statistical gate: an anytime-valid e-value on the paired differences of two arms, one look after each seed.

The test bets on the sign of each difference (testing by betting: Shafer, 2021; bounded bets and Ville's inequality:
Waudby-Smith and Ramdas, 2024). Without an effect, exchanging the arms of a seed changes nothing, so a difference is
symmetric around zero and each factor below has mean one, whatever the sizes of the differences. The product is then a
martingale: it reaches candidates / level with chance level / candidates at most, at any time and for any tails.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from caramba.config.paper import GateConfig

SHARPNESS = 2.0  # of the bet in units of the median difference; larger values bet on the sign alone
State = Literal["accepted", "rejected", "continue"]


@dataclass(frozen=True)
class Pair:
    """One seed in both arms: their metrics, None for a run that crashed or diverged."""

    seed: int
    baseline: float | None
    candidate: float | None


@dataclass(frozen=True)
class Look:
    """The state of the test after some seeds."""

    n_seeds: int
    e_value: float
    state: State


def gains(pairs: Sequence[Pair], gate: GateConfig) -> list[float]:
    """Return what the candidate gained in each pair.

    A failed candidate loses by the largest difference of the loop so far; a failed baseline gains it nothing.
    """
    sign = 1.0 if gate.direction == "more" else -1.0
    found: list[float] = []
    for pair in pairs:
        if _has_failed(pair.candidate):
            found.append(-max((abs(gain) for gain in found), default=0.0) or -1.0)
        elif _has_failed(pair.baseline):
            found.append(0.0)
        else:
            found.append(sign * (float(pair.candidate or 0.0) - float(pair.baseline or 0.0)))
    return found


def e_values(differences: Sequence[float]) -> list[float]:
    """Return the e-value after each difference. Differences of zero change nothing."""
    found: list[float] = []
    value = 1.0
    for index, difference in enumerate(differences):
        # The scale uses the sizes so far and the signs of none, so the sign of this one is still a fair coin.
        scale = statistics.median(abs(item) for item in differences[: index + 1])
        scale = scale or max(abs(item) for item in differences[: index + 1])
        value *= 1.0 if scale == 0 else 1.0 + math.tanh(SHARPNESS * difference / scale)
        found.append(value)
    return found


def look(pairs: Sequence[Pair], gate: GateConfig) -> Look:
    """Return the state of a candidate after its pairs, which must be in the registered order of the seeds.

    It is accepted at the first look that reaches the threshold, and rejected when the remaining seeds cannot reach it.
    """
    if [pair.seed for pair in pairs] != list(gate.seeds[: len(pairs)]):
        raise ValueError("pairs are not in the registered order of the seeds")
    values = e_values(gains(pairs, gate))
    for index, value in enumerate(values):
        if value >= gate.threshold:
            return Look(index + 1, value, "accepted")
    value = values[-1] if values else 1.0
    remaining = len(gate.seeds) - len(values)
    is_lost = value * 2.0**remaining < gate.threshold
    return Look(len(values), value, "rejected" if is_lost else "continue")


def best_trial(metrics: Sequence[float | None], gate: GateConfig) -> int:
    """Return which of an arm's tuning trials is best, the first of equal ones, and the first if all failed."""
    sign = 1.0 if gate.direction == "more" else -1.0
    values = [-math.inf if _has_failed(metric) else sign * float(metric or 0.0) for metric in metrics]
    return values.index(max(values))


def budget_difference(baseline: float, candidate: float) -> float:
    """Return by which share two arms differ in what they spent."""
    most = max(baseline, candidate)
    return 0.0 if most == 0 else abs(baseline - candidate) / most


def _has_failed(metric: float | None) -> bool:
    return metric is None or not math.isfinite(metric)
