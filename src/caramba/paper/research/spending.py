"""The budget of a whole loop: every request and run is reserved in full before it begins, and kept on disk."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from caramba.config.paper import LoopBudgetConfig
from caramba.errors import BudgetExceeded
from caramba.paper.budget import BudgetLedger, Spent
from caramba.runs.files import write_json

SPEND = "spend.json"
KINDS = ("calls", "tokens", "usd", "gpu_hours")


class LoopBudget:
    """What a loop has spent and may spend, in `spend.json`. What a kill left reserved counts as spent."""

    def __init__(self, folder: Path, limits: LoopBudgetConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.file, self.limits, self._clock = folder / SPEND, limits, clock
        plain = json.loads(self.file.read_text(encoding="utf-8")) if self.file.is_file() else {}
        self.spent: dict[str, float] = {kind: plain.get(kind, 0) for kind in KINDS}
        self._wall_hours, self._began = float(plain.get("wall_hours", 0.0)), clock()

    @property
    def wall_hours(self) -> float:
        """Hours that the loop has run, over all interruptions."""
        return self._wall_hours + (self._clock() - self._began) / 3600

    def reserve(self, *, calls: int = 0, tokens: int = 0, usd: float = 0.0, gpu_hours: float = 0.0) -> None:
        """Book the most that a request or a run can use.

        Raises:
            BudgetExceeded: it would cross a limit; nothing is booked then.
        """
        limits = self.limits
        most = {"calls": limits.max_calls, "tokens": limits.max_tokens, "usd": limits.max_cost_usd,
                "gpu_hours": limits.max_gpu_hours}  # fmt: skip
        asked = {"calls": calls, "tokens": tokens, "usd": usd, "gpu_hours": gpu_hours}
        for kind, amount in asked.items():
            limit = most[kind]
            if amount and limit is not None and self.spent[kind] + amount > limit:
                raise BudgetExceeded(
                    f"the next step may take {amount:.6g} {kind}, {self.spent[kind]:.6g} of {limit:g} are spent; raise "
                    "research.budget and resume with the same command"
                )
        if self.wall_hours >= limits.max_wall_hours:
            raise BudgetExceeded(
                f"the loop ran {self.wall_hours:.3g} of max_wall_hours={limits.max_wall_hours:g}; raise it and resume "
                "with the same command"
            )
        self.book(**asked)

    def book(self, *, calls: int = 0, tokens: int = 0, usd: float = 0.0, gpu_hours: float = 0.0) -> None:
        """Add to what is spent, or take back a part of a reservation."""
        for kind, amount in zip(KINDS, (calls, tokens, usd, gpu_hours), strict=True):
            self.spent[kind] = max(0, self.spent[kind] + amount)
        write_json(self.file, {**self.spent, "wall_hours": self.wall_hours})

    def as_dict(self) -> dict[str, Any]:
        """Return the spending on language models, which a replay repeats exactly."""
        return {kind: self.spent[kind] for kind in ("calls", "tokens", "usd")}


class SharedLedger(BudgetLedger):
    """The ledger of a draft or review whose requests are the loop's too."""

    def __init__(self, own: BudgetLedger, loop: LoopBudget) -> None:
        """Continue `own`, whose spending stays shared with this ledger."""
        vars(self).update(vars(own))
        self._loop = loop

    def _take(self, most: Spent) -> None:
        self._loop.reserve(calls=1, tokens=most.tokens, usd=most.cost_usd)
        super()._book(most, 1)

    def _book(self, amount: Spent, sign: int) -> None:
        super()._book(amount, sign)
        self._loop.book(tokens=sign * amount.tokens, usd=sign * amount.cost_usd)
