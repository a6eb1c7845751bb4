"""Fifty thousand texts of the speculative generator itself, against the distribution of the model alone."""

from __future__ import annotations

from typing import Any

import pytest

from caramba.infer import SpeculativeGenerator
from tests.unit.infer.test_speculative import misfit, sharp

N, ROWS = 50_000, 5_000


@pytest.mark.slow
@pytest.mark.parametrize("method", ["draft", "early_exit"])
def test_written_text_follows_the_model(method: str) -> None:
    model, draft = sharp("standard", by=4.5), sharp("standard", seed=7, by=4.5) if method == "draft" else None
    values: dict[str, Any] = {"temperature": 1.5, "top_k": 8, "top_p": 0.95, "max_new_tokens": 3}
    generator = SpeculativeGenerator(
        model, draft=draft, spec_method=method, spec_k=2, cache_kind="fp32", **values
    )
    found, bound = misfit(generator, N, ROWS)
    assert found < bound
