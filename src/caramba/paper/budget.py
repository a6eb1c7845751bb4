"""What a draft has spent and may spend. A request is reserved in full before it is sent, so no limit is crossed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from caramba.config.paper import BudgetConfig
from caramba.errors import BudgetExceeded

# Text and JSON have three to four bytes a token; the estimate of a prompt must not be too small.
BYTES_PER_TOKEN = 2
WAY_ON = "`caramba paper RUN --update`"


@dataclass(frozen=True)
class Price:
    """US dollars per token of prompt and reply."""

    prompt: float
    reply: float


@dataclass
class Spent:
    """What a draft has spent. An attempt whose usage is unknown counts as all that was reserved for it."""

    iterations: int = 0
    prompt_tokens: int = 0
    reply_tokens: int = 0
    cost_usd: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.reply_tokens

    def as_dict(self) -> dict[str, Any]:
        """Return this as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Reserved:
    """The most that one attempt can use."""

    prompt_tokens: int
    reply_tokens: int
    cost_usd: float


class Parent(Protocol):
    """The budget of a whole loop, of which a draft's is a part."""

    def reserve(
        self, *, calls: int = 0, tokens: int = 0, usd: float = 0.0, gpu_hours: float = 0.0
    ) -> None: ...

    def book(self, *, calls: int = 0, tokens: int = 0, usd: float = 0.0, gpu_hours: float = 0.0) -> None: ...


class BudgetLedger:
    """Reserves attempts and books what they used, against the limits of a draft. `price` is None where unknown."""

    def __init__(
        self,
        limits: BudgetConfig,
        spent: Spent,
        price: Price | None,
        way_on: str = WAY_ON,
        parent: Parent | None = None,
    ) -> None:
        """`way_on` is the command that resumes the draft, for messages."""
        self.limits, self.spent, self.price, self.way_on, self.parent = limits, spent, price, way_on, parent

    def begin(self) -> None:
        """Count one more iteration.

        Raises:
            BudgetExceeded: there were as many as there may be.
        """
        if self.spent.iterations >= self.limits.max_iterations:
            raise BudgetExceeded(
                f"the draft took max_iterations={self.limits.max_iterations} requests and is not finished"
                f"{self._way_on()}"
            )
        self.spent.iterations += 1

    def reserve(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Reserved:
        """Book the most that an attempt can use, before it is sent.

        Raises:
            BudgetExceeded: it would cross a limit; nothing is booked then.
        """
        prompt = len(json.dumps([messages, tools], ensure_ascii=False).encode()) // BYTES_PER_TOKEN + 1
        reply = self.limits.max_reply_tokens
        cost = 0.0 if self.price is None else prompt * self.price.prompt + reply * self.price.reply
        if self.spent.tokens + prompt + reply > self.limits.max_tokens:
            raise BudgetExceeded(
                f"the next request may take {prompt + reply:,} tokens, {self.spent.tokens:,} of "
                f"max_tokens={self.limits.max_tokens:,} are spent{self._way_on()}"
            )
        most = self.limits.max_cost_usd
        if most is not None and self.spent.cost_usd + cost > most:
            raise BudgetExceeded(
                f"the next request may cost {cost:.4f} USD, {self.spent.cost_usd:.4f} of max_cost_usd={most:g} are "
                f"spent{self._way_on()}"
            )
        if self.parent is not None:
            self.parent.reserve(calls=1, tokens=prompt + reply, usd=cost)
        reserved = Reserved(prompt, reply, cost)
        self._count(reserved, 1)
        return reserved

    def record_usage(self, reserved: Reserved, prompt_tokens: int | None, reply_tokens: int | None) -> None:
        """Replace a reservation by what was used; unknown usage leaves it as it is."""
        if prompt_tokens is None or reply_tokens is None:
            return
        price = self.price
        cost = 0.0 if price is None else prompt_tokens * price.prompt + reply_tokens * price.reply
        self._book(reserved, -1)
        self._book(Reserved(prompt_tokens, reply_tokens, cost), 1)

    def release(self, reserved: Reserved) -> None:
        """Take a reservation back: the server refused the request."""
        self._book(reserved, -1)

    def _book(self, amount: Reserved, sign: int) -> None:
        self._count(amount, sign)
        if self.parent is not None:
            self.parent.book(
                tokens=sign * (amount.prompt_tokens + amount.reply_tokens), usd=sign * amount.cost_usd
            )

    def _count(self, amount: Reserved, sign: int) -> None:
        self.spent.prompt_tokens += sign * amount.prompt_tokens
        self.spent.reply_tokens += sign * amount.reply_tokens
        self.spent.cost_usd = max(0.0, self.spent.cost_usd + sign * amount.cost_usd)

    def _way_on(self) -> str:
        return f"; raise it and resume with {self.way_on}, which keeps what is written"
