"""Lowering as seen by Lightning: fast paths are in place while a phase trains, and listed in its plan."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import lightning.pytorch as pl

from caramba.distill import Objective
from caramba.lower.lowering import LoweredModel, lower
from caramba.runtime import Decision, RuntimePlan, save_plan
from caramba.train.callbacks.restore_on_exit import RestoreOnExit


class Lowering(RestoreOnExit):
    """Lowers the models of an objective before they are compiled, and restores them at the end.

    The decision `lowered` of plan.json has the modules of the trained model that each pass replaced.
    """

    def __init__(self, objective: Objective, plan: RuntimePlan, run_dir: Path) -> None:
        self.objective, self.plan, self.run_dir = objective, plan, run_dir
        self._lowered: list[LoweredModel] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        device, is_compiled = trainer.strategy.root_device, self.plan.value("compile_model") is not False
        teacher = self.objective.teacher
        if teacher is not None:
            self._lowered.append(lower(teacher, device, "prefill", is_compiled=is_compiled))
        trained = lower(self.objective.model, device, "train", is_compiled=is_compiled)
        self._lowered.append(trained)
        if trainer.is_global_zero:
            found = {name: count for name, count in trained.replaced.items() if count}
            decision = Decision(found, "modules that each pass of caramba.lower replaced")
            decisions = self.plan.decisions | {"lowered": decision}
            save_plan(self.run_dir / "plan.json", dataclasses.replace(self.plan, decisions=decisions))

    def restore(self) -> None:
        while self._lowered:
            self._lowered.pop().restore()
