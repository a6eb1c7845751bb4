"""Fifty thousand texts of the speculative generator itself, against the distribution of the model alone."""

from __future__ import annotations

from typing import Any

import pytest

from caramba.infer import SpeculativeGenerator
from tests.unit.infer.test_speculative import misfit, sharp

N, ROWS = 50_000, 5_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "values"),
    [
        ("draft", {"temperature": 0.9, "top_k": 4, "top_p": 0.9}),
        ("early_exit", {"temperature": 1.3, "top_k": 5}),
    ],
)
def test_written_text_follows_the_model(method: str, values: dict[str, Any]) -> None:
    model, draft = sharp("standard", by=3), sharp("standard", seed=7, by=3) if method == "draft" else None
    fixed: dict[str, Any] = {"max_new_tokens": 3, "cache_kind": "fp32", "spec_k": 2}
    generator = SpeculativeGenerator(model, draft=draft, spec_method=method, **fixed, **values)
    found, bound = misfit(generator, N, ROWS)
    assert found < bound
