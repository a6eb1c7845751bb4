"""Student's interval of paired differences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
