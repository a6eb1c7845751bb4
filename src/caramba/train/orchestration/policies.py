"""Policies: how the trials of a decision are spent, and when a challenger takes over."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from caramba.config.optimizer import halving_rungs
from caramba.config.train import PhaseConfig

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean difference and its interval; infinite where a trial has diverged."""

    mean: float
    low: float
    high: float

    def widen(self, times: float) -> Interval:
        """Return the interval with ends `times` as far from the mean."""
        return Interval(
            self.mean, self.mean - times * (self.mean - self.low), self.mean + times * (self.high - self.mean)
        )


def compute_interval(differences: Sequence[float], *, comparisons: int = 1) -> Interval:
    """Return Student's interval of the mean of paired differences, at 95% over all of `comparisons` (Bonferroni).

    A difference of +inf, of a candidate that has diverged, makes the interval that. Equal differences have no width.
    """
    if any(math.isnan(x) for x in differences) or math.inf in differences:
        return Interval(math.inf, math.inf, math.inf)
    if -math.inf in differences:
        all_are = all(x == -math.inf for x in differences)
        return Interval(-math.inf, -math.inf, -math.inf if all_are else math.inf)
    mean, n = statistics.fmean(differences), len(differences)
    if n < 2:
        return Interval(mean, -math.inf, math.inf)
    error = statistics.stdev(differences) / math.sqrt(n)
    half = student_quantile(1 - (1 - LEVEL) / 2 / comparisons, n - 1) * error if error else 0.0
    return Interval(mean, mean - half, mean + half)


def student_quantile(p: float, degrees: int) -> float:
    """Return the quantile of Student's t for p from 0.5 to 1: t = sqrt(d) tan(a), a's density is cos^(d - 1)."""
    angles = np.linspace(0.0, math.pi / 2, 200_001)
    density = np.cos(angles) ** (degrees - 1)
    mass = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    at = float(np.interp((p - 0.5) * 2, mass / mass[-1], angles))
    return math.sqrt(degrees) * math.tan(at)


Score = Callable[[str, int, int, int | None], float]
"""Held-out loss of a strategy after a horizon of steps: name, horizon, repeat, half of the held-out windows."""
FEW = 4
"""Repeats of which none may be against a challenger: with one difference of 0 and others equal, t is n - 1, which is
below Student's quantile."""
BACK = 2.0
"""How much wider the interval is for a switch back to the strategy that was left last."""


@dataclass
class Choice:
    """What a decision has chosen, and why."""

    choice: str
    reason: str
    scores: dict[str, list[float]] = field(default_factory=dict)
    challenger: str | None = None
    interval: Interval | None = None

    def record(self) -> dict[str, Any]:
        interval = self.interval
        return {
            "choice": self.choice,
            "reason": self.reason,
            "challenger": self.challenger,
            "scores": self.scores,
            "interval": None if interval is None else [interval.mean, interval.low, interval.high],
        }


@dataclass
class Gains:
    """What challengers have gained against the strategy in use, for ucb; part of the run's state."""

    tries: dict[str, int] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    squares: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, gain: float) -> None:
        if not math.isfinite(gain):
            gain = -1.0  # nats: a candidate that diverges is worse than any that does not
        self.tries[name] = self.tries.get(name, 0) + 1
        self.sums[name] = self.sums.get(name, 0.0) + gain
        self.squares[name] = self.squares.get(name, 0.0) + gain * gain

    def best(self, names: Sequence[str]) -> str:
        """Return the candidate with the largest upper confidence bound; one that was never tried comes first.

        Reference: Auer, Cesa-Bianchi and Fischer, 2002 (UCB1, its width scaled by the deviation of gains).
        """
        fresh = [name for name in names if not self.tries.get(name)]
        if fresh:
            return fresh[0]
        total = sum(self.tries[name] for name in names)
        mean = sum(self.sums[name] for name in names) / total
        spread = math.sqrt(max(0.0, sum(self.squares[name] for name in names) / total - mean * mean))

        def bound(name: str) -> float:
            n = self.tries[name]
            return self.sums[name] / n + spread * math.sqrt(2.0 * math.log(total) / n)

        return max(names, key=bound)


def choose(
    phase: PhaseConfig,
    active: str,
    challengers: Sequence[str],
    score: Score,
    *,
    gains: Gains,
    left: str | None = None,
) -> Choice:
    """Find a challenger, compare it with the strategy in use over repeats, and switch if the interval excludes 0.

    Repeats end where no further one could have the interval exclude 0. A challenger is chosen on one half of the
    held-out windows and tested on the other, on other batches. The interval is 95% over all challengers of the
    decision. `left` is the strategy that was left last.
    """
    scores: dict[str, list[float]] = {}
    names = list(challengers)
    if phase.orchestrator_policy == "ucb":
        names = [gains.best(names)]
    for arms, horizon in halving_rungs(len(names), phase.orchestrator_eval_horizon):
        losses = {name: score(name, horizon, 0, 0) for name in names}
        for name, loss in losses.items():
            scores.setdefault(f"{name}@{horizon}", []).append(loss)
        names = sorted(names, key=lambda name: losses[name])[: max(1, arms // 2)]
    challenger = names[0]
    horizon = phase.orchestrator_eval_horizon
    for repeat in range(1, phase.orchestrator_repeats + 1):
        for name in (active, challenger):
            scores.setdefault(name, []).append(score(name, horizon, repeat, 1))
        if is_settled(_difference(scores[challenger][-1], scores[active][-1]), phase.orchestrator_repeats):
            break
    pairs = list(zip(scores[challenger], scores[active], strict=True))
    differences = [_difference(first, second) for first, second in pairs]
    compared = len(challengers) if phase.orchestrator_policy == "halving" else 1
    interval = compute_interval(differences, comparisons=compared)
    gains.add(challenger, -interval.mean)
    if challenger == left and math.isfinite(interval.mean):
        interval = interval.widen(BACK)
    if interval.high < 0:
        reason = f"{challenger} is ahead of {active}: the interval excludes 0"
        return Choice(challenger, reason, scores, challenger, interval)
    reason = f"{challenger} is not ahead of {active}: the interval does not exclude 0"
    return Choice(active, reason, scores, challenger, interval)


def is_settled(difference: float, repeats: int) -> bool:
    """Whether an interval over `repeats` differences, this one among them, cannot be all below 0."""
    return difference >= 0 and repeats <= FEW


def _difference(first: float, second: float) -> float:
    """Return first - second; 0 where both are infinite."""
    return 0.0 if first == second else first - second
