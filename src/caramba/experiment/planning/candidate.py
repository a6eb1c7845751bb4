"""What planning tries, what it found, and how long it may take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

WARM_UP = 2
SHARE, LEAST_SECONDS = 0.05, 120.0
LEAST_OF_PHASE = 30.0


@dataclass(frozen=True)
class StepCandidate:
    """One config of a phase's step, and the optimiser steps to time after the warm-up."""

    batch_size: int
    dtype: str = "float32"
    activation_checkpointing: str = "none"
    compile_model: bool | str = False
    timed: int = 3

    def __str__(self) -> str:
        parts = [f"batch {self.batch_size}", self.dtype]
        if self.activation_checkpointing != "none":
            parts.append(f"{self.activation_checkpointing} checkpointing")
        if self.compile_model:
            parts.append(f"compiled ({'default' if self.compile_model is True else self.compile_model})")
        return ", ".join(parts)

    @property
    def warm_up(self) -> int:
        """Steps before the timed ones: CUDA graphs are recorded in the third."""
        return WARM_UP + 1 if self.compile_model else WARM_UP


@dataclass(frozen=True)
class Trial:
    """What a candidate took: seconds per micro-batch of each optimiser step, peak bytes, and the loss of the last step.

    `refusal` is the reason for no figures; `is_out_of_memory` is True if that was memory.
    """

    candidate: StepCandidate
    seconds: tuple[float, ...] = ()
    peak_bytes: int = 0
    loss: float = 0.0
    refusal: str = ""
    is_out_of_memory: bool = False

    @property
    def step_seconds(self) -> float:
        """Median seconds of a micro-batch, warm."""
        return statistics.median(self.seconds[self.candidate.warm_up :])

    @property
    def start_seconds(self) -> float:
        """What the first steps took beyond warm ones: compilation, above all."""
        first = self.seconds[: self.candidate.warm_up]
        return max(0.0, sum(first) - len(first) * self.step_seconds)

    @property
    def samples_per_s(self) -> float:
        """Sequences per second, warm."""
        return self.candidate.batch_size / self.step_seconds

    def figures(self) -> dict[str, float]:
        """Return what was measured, for plan.json."""
        if self.refusal:
            return {}
        return {
            "step_seconds": self.step_seconds,
            "start_seconds": self.start_seconds,
            "peak_bytes": float(self.peak_bytes),
        }


Measure = Callable[[StepCandidate], Trial]


@dataclass
class Budget:
    """Seconds that the planning of a phase may take: 5% of it, at least `seconds`. What did not fit is kept by name."""

    seconds: float = LEAST_SECONDS
    clock: Callable[[], float] = time.monotonic
    skipped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._began = self.clock()

    @classmethod
    def of_phases(cls, n_phases: int) -> Budget:
        """Return the budget of one of `n_phases` that are planned for one run: they share the least."""
        return cls(max(LEAST_OF_PHASE, LEAST_SECONDS / max(1, n_phases)))

    def cover(self, run_seconds: float) -> None:
        """Allow the share of a run that takes `run_seconds`."""
        self.seconds = max(self.seconds, SHARE * run_seconds)

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return self.clock() - self._began

    @property
    def left(self) -> float:
        """Seconds that remain, 0 when none do."""
        return max(0.0, self.seconds - self.spent)

    def allows(self, candidate: StepCandidate, seconds: float, share: float = 1.0) -> bool:
        """Whether a trial of about `seconds` fits a share of the budget; if not, it is recorded as skipped."""
        left = max(0.0, share * self.seconds - self.spent)
        if seconds <= left:
            return True
        self.skip(candidate, f"about {seconds:.0f} s, {left:.0f} s of {self.seconds:.0f} s left for it")
        return False

    def skip(self, what: Any, why: str) -> None:
        """Record a trial that did not finish, once per line, for all callers."""
        line = f"{what}: {why}"
        if line not in self.skipped:
            self.skipped.append(line)
