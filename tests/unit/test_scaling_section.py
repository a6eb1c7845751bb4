"""What the benchmarks page says of scaling: shares of linear by the best settings, losses that must agree."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest


def test_scaling_is_judged_by_its_best_row_and_by_its_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts" / "bench"))
    verdicts = importlib.import_module("sections_scaling").verdicts
    sys.modules.pop("sections_scaling")

    def row(strategy: str, devices: int, speed: float, losses: list[float], **settings: int) -> dict:
        found = {"strategy": strategy, "devices": devices, "tokens_per_s": speed, "losses": losses}
        return {**found, "settings": settings}

    rows = [
        row("single", 1, 100.0, [5.0, 4.0]),
        row("ddp", 2, 199.0, [5.0, 3.0]),
        row("ddp", 4, 360.0, [5.0, 3.5]),
        row("ddp", 4, 376.0, [5.0, 3.504], bucket_cap_mb=100),
        row("fsdp2", 4, 356.0, [5.0, 3.502]),
    ]
    data = {"must": {"ddp": 0.93, "fsdp2": 0.9, "losses_within": 5e-3}, "rows": rows}
    shares, losses = verdicts(data)
    assert "ddp 94.0% with bucket_cap_mb=100 (must 93%): met" in shares
    assert "fsdp2 89.0% with default settings (must 90%): **missed**" in shares
    assert "on 4 devices" in shares
    assert losses.startswith("Largest difference of a step's loss between rows of as many devices: 4.0e-03 (")
    assert losses.endswith("0.005): met.")
    rows[4]["losses"] = [5.0, 3.4985]
    assert verdicts(data)[-1].endswith("**missed**."), "from the farthest, not from the first"
