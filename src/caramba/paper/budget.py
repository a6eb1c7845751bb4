"""What a draft has spent and may spend. A request is reserved in full before it is sent, so no limit is crossed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from caramba.config.paper import BudgetConfig
from caramba.errors import BudgetExceeded

# Text and JSON have three to four bytes a token; the estimate of a prompt must not be too small.
BYTES_PER_TOKEN = 2


@dataclass(frozen=True)
class Price:
    """US dollars per token of prompt and reply."""

    prompt: float
    reply: float


@dataclass
class Spent:
    """What a draft has spent, or the most that one attempt can. Of an attempt without usage, all that was reserved."""

    iterations: int = 0
    prompt_tokens: int = 0
    reply_tokens: int = 0
    cost_usd: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.reply_tokens


class BudgetLedger:
    """Reserves attempts and books what they used, against the limits of a draft. `price` is None where unknown."""

    def __init__(self, limits: BudgetConfig, spent: Spent, price: Price | None) -> None:
        self.limits, self.spent, self._price = limits, spent, price or Price(0.0, 0.0)

    def reserve(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Spent:
        """Book the most that an attempt can use, before it is sent.

        Raises:
            BudgetExceeded: it would cross a limit; nothing is booked then.
        """
        prompt = len(json.dumps([messages, tools], ensure_ascii=False).encode()) // BYTES_PER_TOKEN + 1
        most, limits = self._of(prompt, self.limits.max_reply_tokens), self.limits
        kinds = {"max_iterations": "iterations", "max_tokens": "tokens", "max_cost_usd": "cost_usd"}
        for limit, kind in kinds.items():
            there, amount, allowed = getattr(self.spent, kind), getattr(most, kind), getattr(limits, limit)
            if allowed is not None and there + amount > allowed:
                spent = f"{there:,.6g} of {limit}={allowed:,.10g} are spent"
                raise BudgetExceeded(f"the next request may take {amount:,.6g} {kind}, {spent}; raise it")
        self._take(most)
        return most

    def record_usage(self, reserved: Spent, prompt_tokens: int | None, reply_tokens: int | None) -> None:
        """Replace a reservation by what was used; unknown usage leaves it as it is."""
        if prompt_tokens is not None and reply_tokens is not None:
            self.release(reserved)
            self._book(self._of(prompt_tokens, reply_tokens), 1)

    def release(self, reserved: Spent) -> None:
        """Take a reservation back: the server refused the request."""
        self._book(reserved, -1)

    def _of(self, prompt: int, reply: int) -> Spent:
        return Spent(1, prompt, reply, prompt * self._price.prompt + reply * self._price.reply)

    def _take(self, most: Spent) -> None:
        """Book a reservation that the limits allow."""
        self._book(most, 1)

    def _book(self, amount: Spent, sign: int) -> None:
        self.spent.iterations += sign * amount.iterations
        self.spent.prompt_tokens += sign * amount.prompt_tokens
        self.spent.reply_tokens += sign * amount.reply_tokens
        self.spent.cost_usd = max(0.0, self.spent.cost_usd + sign * amount.cost_usd)
