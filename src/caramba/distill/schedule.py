"""Which blocks train now: all at once or one after another, each until its smoothed loss has converged."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from caramba.config.train import ConvergenceConfig, check_block_steps

SMOOTHING = 0.98
RECORD_EVERY = 10
BY_BLOCK = ("sums", "seen", "taken", "held", "ended")
"""What a state holds of each block."""
CONVERGED, OUT_OF_STEPS = "converged", "max_steps"


class BlockSchedule:
    """Smoothed loss, steps and end of each block. Its state is plain numbers and text.

    Concurrent: every block trains until it has converged, without `convergence` to the phase's end. Sequential: one
    block at a time, in order; each has `convergence.max_steps` or an equal share of the phase's steps.

    Losses are smoothed exponentially and corrected for the start. A block has converged when its smoothed loss has
    been at `target` or below for `patience` steps in a row.

    Raises:
        ConfigError: a sequential phase with fewer steps than blocks.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        steps: int,
        is_sequential: bool = False,
        convergence: ConvergenceConfig | None = None,
    ) -> None:
        self.names, self.is_sequential, self.convergence = tuple(names), is_sequential, convergence
        if is_sequential:
            check_block_steps(len(self.names), steps)
        self._limits = self._limits_of(steps)
        self._steps = 0
        self._sums: dict[str, float] = {}
        self._seen: dict[str, int] = {}
        self._taken: dict[str, int] = {}
        self._held: dict[str, int] = {}
        self._ended: dict[str, str] = {}

    @property
    def needs_losses(self) -> bool:
        """Whether `advance` needs the losses of this step: always where they decide which blocks train, else now and
        then, for the record."""
        return self.convergence is not None or (self._steps + 1) % RECORD_EVERY == 0

    @property
    def is_done(self) -> bool:
        """Whether no block trains any more."""
        return bool(self.names) and len(self._ended) == len(self.names)

    def active(self) -> tuple[str, ...]:
        """Return the blocks that train in the coming step, in order."""
        left = tuple(name for name in self.names if name not in self._ended)
        return left[:1] if self.is_sequential else left

    def advance(self, losses: Mapping[str, float] | None = None) -> None:
        """Count one optimiser step of the active blocks, with their losses where these are known."""
        self._steps += 1
        for name in self.active():
            self._taken[name] = self._taken.get(name, 0) + 1
            if losses is not None:
                self._record(name, losses[name])
            limit = self._limits.get(name)
            if self.convergence is not None and self._held.get(name, 0) >= self.convergence.patience:
                self._ended[name] = CONVERGED
            elif limit is not None and self._taken[name] >= limit:
                self._ended[name] = OUT_OF_STEPS

    def span(self, step: int, steps: int) -> tuple[int, int]:
        """Return (step, steps) of the learning-rate schedule: of the active block when blocks train in turn."""
        if not self.is_sequential or not self.active():
            return step, steps
        name = self.active()[0]
        return self._taken.get(name, 0), self._limits[name]

    def block_losses(self) -> dict[str, float]:
        """Return the smoothed loss of each block that has one, in the order of the blocks."""
        return {
            name: self._sums[name] / (1.0 - SMOOTHING ** self._seen[name]) for name in self.names if name in self._seen
        }

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return the steps, smoothed loss and end of each block, for a phase's record."""
        losses = self.block_losses()
        return {
            name: {
                "steps": self._taken.get(name, 0),
                "smoothed_loss": losses.get(name),
                "ended": self._ended.get(name),
            }
            for name in self.names
        }

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, **{name: dict(getattr(self, f"_{name}")) for name in BY_BLOCK}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps = int(state["steps"])
        for name in BY_BLOCK:
            setattr(self, f"_{name}", dict(state[name]))

    def _record(self, name: str, loss: float) -> None:
        if not math.isfinite(loss):  # of a step that was left out
            return
        self._sums[name] = SMOOTHING * self._sums.get(name, 0.0) + (1.0 - SMOOTHING) * loss
        self._seen[name] = self._seen.get(name, 0) + 1
        if self.convergence is not None:
            is_low = self.block_losses()[name] <= self.convergence.target
            self._held[name] = self._held.get(name, 0) + 1 if is_low else 0

    def _limits_of(self, steps: int) -> dict[str, int]:
        most = None if self.convergence is None else self.convergence.max_steps
        if not self.is_sequential:
            return {} if most is None else dict.fromkeys(self.names, most)
        share, rest = divmod(steps, max(1, len(self.names)))
        shares = {name: share + (place < rest) for place, name in enumerate(self.names)}
        return shares if most is None else dict.fromkeys(self.names, most)
