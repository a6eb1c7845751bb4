"""What was planned, held against what the first steps took: the warnings say what the plan's figures are of."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from caramba.runs.events import read_events
from caramba.runtime import Decision, RuntimePlan
from caramba.train.callbacks import planning
from caramba.train.callbacks.planning import MEASURED_STEPS, WARM_UP_STEPS, RuntimePlanning

STEP = "pretrain: a step takes 0.3 s, +50% of the 0.2 s that were planned"
PEAK = "pretrain: it peaks at 9 GB, +50% of the 6 GB that were planned; plan=refresh measures again"


@pytest.mark.parametrize(
    ("ranks", "step"),
    [
        (1, f"{STEP}; plan=refresh measures again"),
        (2, f"{STEP} in one process, without what 2 ranks exchange"),
    ],
)
def test_a_planned_peak_is_of_all_ranks_and_a_planned_step_of_one_process(
    ranks: int, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(planning, "get_world_size", lambda: ranks)
    monkeypatch.setattr(planning.logger, "warning", said.append)
    foretold = Decision(0.2, "measured", {"peak_bytes": 6e9})
    plan = RuntimePlan("pretrain", "", {}, {"device": Decision("cpu", ""), "step_seconds": foretold})
    callback = RuntimePlanning(plan, tmp_path, tokens_per_step=30)
    callback.meter = SimpleNamespace(device=torch.device("cuda"), peak_bytes=lambda: 9 * 10**9)  # type: ignore[assignment]
    callback._seconds = [0.3] * (WARM_UP_STEPS + MEASURED_STEPS)
    callback._report()
    assert said == [step, PEAK]
    (event,) = read_events(tmp_path)
    assert event["tokens_per_s"] == pytest.approx(100.0)
