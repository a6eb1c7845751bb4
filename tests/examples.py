"""How many random examples the tests draw: a third of what they say, and all with `make test ARGS=--thorough`."""

from __future__ import annotations

LEAST = 10
is_thorough = False
"""Set by tests/conftest.py before any test is loaded."""


def examples(most: int) -> int:
    """Return how many of `most` random examples to draw."""
    return most if is_thorough else max(min(most, LEAST), most // 3)
