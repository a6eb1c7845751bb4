"""The largest batch that fits: few trials, upwards, on what a step's memory is: a constant and so much per sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from caramba.experiment.planning.candidate import Budget, Measure, StepCandidate, Trial

GROWTH = 4  # at most, from one trial to the next: the first slopes are those of the smallest batches
SLOWER = 1.05  # of a larger batch's seconds per sequence, over a smaller's
PAST_BEST = 1.10
OVERHEAD_S = 3.0  # of a trial beyond its steps
Ended = Literal["speed", "time", "most", "memory", "refusal"]
"""Why a search ended: larger batches take longer per sequence; the seconds were used up; `most` was reached; a larger
batch does not fit; a trial was refused for another reason than memory."""


def largest_batch(
    measure: Measure,
    candidate: StepCandidate,
    *,
    target_bytes: float,
    most: int,
    budget: Budget,
    share: float = 1.0,
    known: Trial | None = None,
    first: int = 1,
) -> tuple[Trial | None, list[Trial], Ended]:
    """Find the largest batch up to `most` whose step peaks at `target_bytes` or less.

    Memory grows linearly in the batch, so each trial's batch is what the last two foretell for the target, at most four
    times the batch before. A batch that runs out of memory, or over the target, bounds what follows. From 16 on batches
    are multiples of 8. A larger batch that takes over 5% longer per sequence than a smaller one is not taken, and after
    two that take over 10% longer none is tried.

    Args:
        share: of the budget, which this may use up.
        known: a trial that was made before; if it fits, smaller batches are not tried.
        first: the batch to begin with; the batch that another config of the same step fits.

    Returns:
        (the trial to go by, None when none fits; every trial; why no larger batch was taken).
    """
    fits: list[Trial] = []
    trials: list[Trial] = []
    over: int | None = None  # the smallest batch that is known not to fit
    size = min(first, most)
    if known is not None and known.candidate.batch_size <= most and known.peak_bytes <= target_bytes:
        fits.append(known)
        trials.append(known)
        if size <= known.candidate.batch_size:
            following = _next_size(fits, over, target_bytes, most)
            if following is None:
                return known, trials, _bound(fits, over, target_bytes, most)
            size = following
    ended: Ended
    while True:
        candidate = replace(candidate, batch_size=size)
        if fits and not budget.allows(candidate, _expected_s(fits[-1], candidate), share):
            ended = "time"
            break
        if trials and not fits and not budget.left:
            budget.skip(candidate, f"{budget.spent:.0f} s of {budget.seconds:.0f} s went into batches that do not fit")
            ended = "time"
            break
        trial = measure(candidate)
        trials.append(trial)
        if trial.refusal and not trial.is_out_of_memory:
            ended = "refusal"
            break
        if trial.refusal or trial.peak_bytes > target_bytes:
            over = size
        else:
            fits.append(trial)
        following = _next_size(fits, over, target_bytes, most)
        if _is_past_best(fits):
            ended = "speed"
            break
        if following is None:
            ended = _bound(fits, over, target_bytes, most)
            break
        size = following
    best = _fastest(fits)
    is_largest = best is None or best.candidate.batch_size == _largest(fits).candidate.batch_size
    return best, trials, ended if is_largest else "speed"


def _next_size(fits: list[Trial], over: int | None, target_bytes: float, most: int) -> int | None:
    """Return the batch to try next, None when the largest is known closely enough."""
    if not fits:
        return None if over is None or over == 1 else over // 2
    size = _largest(fits).candidate.batch_size
    bound = most if over is None else min(most, over - 1)
    if len(fits) == 1 and over is None:
        return min(2 * size, most) if most > size else None
    foretold = bound if len(fits) == 1 else _foretold(fits, target_bytes)
    following = min(foretold, GROWTH * size, bound)
    if over is not None:  # the forecast was wrong once: at most to the middle
        following = min(following, (size + over) // 2)
    if following >= 16:
        following -= following % 8
    return following if following > size + size // 20 else None


def _bound(fits: list[Trial], over: int | None, target_bytes: float, most: int) -> Ended:
    """Return what the largest batch that fits has come up against: `most`, or less memory than that would need."""
    if not fits or over is not None:
        return "memory"
    is_at_most = _largest(fits).candidate.batch_size >= most
    return "most" if is_at_most or _foretold(fits, target_bytes) >= most else "memory"


def _largest(fits: list[Trial]) -> Trial:
    return max(fits, key=lambda trial: trial.candidate.batch_size)


def _foretold(fits: list[Trial], target_bytes: float) -> int:
    first, last = sorted(fits, key=lambda trial: trial.candidate.batch_size)[-2:]
    slope = (last.peak_bytes - first.peak_bytes) / (last.candidate.batch_size - first.candidate.batch_size)
    if slope <= 0:  # the constant hides it: grow until it shows
        return GROWTH * last.candidate.batch_size
    return last.candidate.batch_size + int((target_bytes - last.peak_bytes) / slope)


def _expected_s(last: Trial, candidate: StepCandidate) -> float:
    """Seconds of a trial, were its time that of the last in proportion to its batch, with as long a start."""
    growth = candidate.batch_size / last.candidate.batch_size
    return OVERHEAD_S + last.start_seconds + growth * last.step_seconds * (candidate.warm_up + candidate.timed)


def _is_past_best(fits: list[Trial]) -> bool:
    best = max((trial.samples_per_s for trial in fits), default=0.0)
    return len(fits) > 2 and all(trial.samples_per_s * PAST_BEST < best for trial in fits[-2:])


def _fastest(fits: list[Trial]) -> Trial | None:
    """Return the largest, unless a smaller one is faster per sequence by more than noise."""
    if not fits:
        return None
    by_rate: Callable[[Trial], float] = lambda trial: trial.samples_per_s  # noqa: E731
    best = max(fits, key=by_rate)
    near = [trial for trial in fits if trial.samples_per_s * SLOWER >= best.samples_per_s]
    return max(near, key=lambda trial: trial.candidate.batch_size)
