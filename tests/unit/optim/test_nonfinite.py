"""A step that is not finite stops the run, with its batch named, or is left out and counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from caramba.config.train import PhaseConfig
from caramba.errors import CarambaError
from caramba.optim import NONFINITE, NonFiniteWatch
from caramba.runs.events import read_events

FINE, BROKEN = torch.tensor(2.0), torch.tensor(torch.inf)


def watch(policy: str, folder: Path) -> NonFiniteWatch:
    phase = PhaseConfig(phase="pretrain", steps=50, lr=0.5, nonfinite=policy)  # type: ignore[arg-type]
    return NonFiniteWatch(phase, folder, "pretrain", lambda step: [10 * step, 10 * step + 1])


def test_stop_names_the_batch(tmp_path: Path) -> None:
    held = watch("stop", tmp_path)
    assert held.allows(0, FINE, FINE)
    with pytest.raises(
        CarambaError, match=r"pretrain: the loss is 2 and the gradient's norm inf at step 4; .*"
    ) as caught:
        held.allows(3, FINE, BROKEN)
    assert caught.value.exit_status == 1
    assert "or leave such steps out with nonfinite=skip" in str(caught.value)
    assert str(tmp_path / NONFINITE) in str(caught.value)
    record = json.loads((tmp_path / NONFINITE).read_text())
    assert (record["step"], record["loss"], record["grad_norm"]) == (4, 2.0, "inf")
    assert record["windows"] == [30, 31]


def test_skip_leaves_the_step_out_and_gives_up_after_twenty_in_a_row(tmp_path: Path) -> None:
    held = watch("skip", tmp_path)
    assert [held.allows(step, BROKEN if step % 2 else FINE, FINE) for step in range(4)] == [True, False] * 2
    saved, held = held.state_dict(), watch("skip", tmp_path)
    held.load_state_dict(saved)
    events = list(read_events(tmp_path))
    assert [(event["event"], event["step"], event["windows"]) for event in events] == [
        ("step_skipped", 2, [10, 11]),
        ("step_skipped", 4, [30, 31]),
    ]
    assert not any(held.allows(step, BROKEN, FINE) for step in range(4, 22))
    with pytest.raises(CarambaError, match=r"20 steps in a row were skipped, and the loss is inf"):
        held.allows(22, BROKEN, FINE)
    assert held.skipped == 21, "one was before the last that was taken"
