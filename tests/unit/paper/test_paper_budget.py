"""No order of requests, failures and missing usage crosses a limit."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from caramba.config.paper import BudgetConfig
from caramba.errors import BudgetExceeded
from caramba.paper.budget import BudgetLedger, Price, Spent

STEP = st.tuples(
    st.integers(0, 4000),  # bytes of the prompt
    st.sampled_from(["used", "unknown", "refused", "killed"]),
    st.floats(0, 1),  # how much of what was reserved is used
)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(STEP, max_size=30), st.integers(100, 5000), st.floats(0.0001, 0.01), st.integers(1, 20))
def test_spending_never_exceeds_the_limits(
    steps: list[tuple[int, str, float]], max_tokens: int, max_cost: float, max_iterations: int
) -> None:
    limits = BudgetConfig(
        max_tokens=max_tokens, max_cost_usd=max_cost, max_iterations=max_iterations, max_reply_tokens=50
    )
    spent = Spent()
    for size, outcome, share in steps:
        ledger = BudgetLedger(limits, spent, Price(1e-6, 3e-6))
        messages: list[dict[str, Any]] = [{"role": "user", "content": "x" * size}]
        before = asdict(spent)
        try:
            reserved = ledger.reserve(messages, [])
        except BudgetExceeded:
            assert asdict(spent) == pytest.approx(before)
            continue
        if outcome == "used":
            ledger.record_usage(reserved, int(share * reserved.prompt_tokens), int(share * reserved.reply_tokens))
        elif outcome == "unknown":
            ledger.record_usage(reserved, None, 7)
        elif outcome == "refused":
            ledger.release(reserved)
        else:  # what a killed process leaves is what was saved with the reservation
            spent = Spent(**json.loads(json.dumps(asdict(spent))))
        assert spent.tokens <= max_tokens
        assert spent.cost_usd <= max_cost * (1 + 1e-9)
        assert spent.iterations <= max_iterations


def test_limits_say_what_was_reached() -> None:
    ledger = BudgetLedger(BudgetConfig(max_iterations=1, max_reply_tokens=10), Spent(), None)
    ledger.reserve([], [])
    with pytest.raises(BudgetExceeded, match=r"1 iterations, 1 of max_iterations=1 are spent; raise it"):
        ledger.reserve([], [])
    ledger = BudgetLedger(BudgetConfig(max_cost_usd=0.001, max_reply_tokens=10), Spent(), Price(1.0, 1.0))
    with pytest.raises(BudgetExceeded, match=r"may take \d+ cost_usd, 0 of max_cost_usd=0\.001 are spent; raise it"):
        ledger.reserve([], [])
