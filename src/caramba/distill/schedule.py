"""What is known of each block while all are distilled at once: a smoothed loss per block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SMOOTHING = 0.98


class BlockSchedule:
    """Exponentially smoothed loss of each block, bias-corrected for the start. Its state is plain numbers."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._seen: dict[str, int] = {}

    def record(self, losses: Mapping[str, float]) -> None:
        """Take one step's loss of each block."""
        for name, loss in losses.items():
            self._sums[name] = SMOOTHING * self._sums.get(name, 0.0) + (1.0 - SMOOTHING) * loss
            self._seen[name] = self._seen.get(name, 0) + 1

    def smoothed(self) -> dict[str, float]:
        """Return the smoothed loss of each block in the order in which the blocks were first seen."""
        return {name: total / (1.0 - SMOOTHING ** self._seen[name]) for name, total in self._sums.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self._sums), "seen": dict(self._seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sums, self._seen = dict(state["sums"]), dict(state["seen"])
