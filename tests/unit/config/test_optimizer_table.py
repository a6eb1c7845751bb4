"""The table of optimisers: its rows, and what of them is refused."""

from __future__ import annotations

import pytest

from caramba.config.benchmark import BenchmarkConfig, OptimizersConfig


def test_adamw_is_the_row_that_others_are_compared_with() -> None:
    config = BenchmarkConfig.model_validate({"id": "a", "config": {"type": "optimizers"}}).config
    assert isinstance(config, OptimizersConfig)
    # As manifests from before there was a number have it.
    assert OptimizersConfig.model_validate({"type": "optimizers", "decisions": None}).decisions is None
    assert config.rows[0] == "adamw"
    assert len(config.rates) >= 5
    assert config.seeds >= 5
    for rows in (["lion", "adamw"], ["adamw", "lion", "lion"], ["muon"]):
        with pytest.raises(ValueError, match="every row is compared with adamw; name it first"):
            OptimizersConfig.model_validate({"type": "optimizers", "rows": rows})
