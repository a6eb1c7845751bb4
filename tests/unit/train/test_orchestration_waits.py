"""Watching and guarding a phase reads nothing from the device that a plain step does not, and adds few launches."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from caramba.optim import build_optimizer
from caramba.optim.portfolio import Portfolio, build_strategy_clip
from caramba.train.orchestration.guard import LEAST, Guard
from tests.unit.train.orchestrated import orchestrated, phase_of, train

STEPS = 34
READS = ("_local_scalar_dense", "item", "is_nonzero", "equal")


NO_LAUNCH = ("detach", "slice", "select", "view", "alias", "unbind", "lift_fresh")


def launches(ops: Counter[str]) -> int:
    return sum(n for name, n in ops.items() if name not in NO_LAUNCH and not name.startswith("_record_function"))


class Ops(TorchDispatchMode):
    """Counts the operators of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.now: Counter[str] = Counter()
        self.steps: list[Counter[str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.now[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Marks(pl.Callback):
    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.ops.steps.append(self.ops.now)
        self.ops.now = Counter()


def ops_of(folder: Path, **keys: Any) -> Counter[str]:
    """Return the operators of a late step between two decisions and two snapshots."""
    folder.mkdir()
    phase = (orchestrated if keys else phase_of)(steps=STEPS, save_every=None, **keys)
    with Ops() as ops:
        train(phase, folder, [Marks(ops)])
    assert ops.steps[31] == ops.steps[32] == ops.steps[33], "a step like its neighbours"
    return ops.steps[32]


def test_a_step_waits_no_more_than_a_plain_one_and_launches_little_more(tmp_path: Path) -> None:
    plain = ops_of(tmp_path / "plain")
    watched: dict[str, Any] = {"orchestrator_decision_interval": 20, "orchestrator_eval_horizon": 2}
    monitor = ops_of(tmp_path / "monitor", orchestrator_mode="monitor", **watched)
    alone = ops_of(tmp_path / "alone", orchestrator_strategies=["conservative_adamw"], **watched)
    assert {key: plain[key] for key in READS} == {key: monitor[key] for key in READS}
    assert {key: plain[key] for key in READS} == {key: alone[key] for key in READS}
    assert plain["_local_scalar_dense"] == 0
    assert launches(monitor) - launches(plain) == 1, "the loss is kept"
    assert launches(alone) - launches(plain) <= 20, "five passes over the weights, the others of single numbers"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_guarded_step_waits_for_nothing_on_a_device() -> None:
    phase = orchestrated(orchestrator_strategies=["conservative_adamw", "spike_resistant", "lion"])
    named = [(f"layers.{at}", torch.nn.Parameter(torch.randn(32, 8, device="cuda"))) for at in range(4)]
    portfolio = build_optimizer(named, phase)
    assert isinstance(portfolio, Portfolio)
    parameters = [p for _, p in named]
    clip = build_strategy_clip(portfolio, parameters)
    assert clip is not None
    guard = Guard(phase, portfolio, parameters, lambda *_, **__: None)
    loss, generator = torch.ones((), device="cuda"), torch.Generator("cuda").manual_seed(0)
    try:
        for step in range(LEAST + 4):
            for p in parameters:
                p.grad = torch.randn(p.shape, device="cuda", generator=generator)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
            assert guard.allows(step, loss, clip([parameters]))
            portfolio.step()
            guard.check_update(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert guard.loss.limit(1.0, 1.0) < 2.0, "it has read the steps"
