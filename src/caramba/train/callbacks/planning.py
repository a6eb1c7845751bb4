"""The runtime plan as seen by Lightning: when it is recorded, and when reality is held against it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from caramba.runs.events import append_event
from caramba.runtime import RuntimePlan, save_plan

WARM_UP_STEPS = 3
MEASURED_STEPS = 20


class RuntimePlanning(pl.Callback):
    """Writes the phase's plan before its first step, and the speed of its first steps after warm-up as an event."""

    def __init__(self, plan: RuntimePlan, run_dir: Path, tokens_per_step: int) -> None:
        self.plan, self.run_dir, self.tokens_per_step = plan, run_dir, tokens_per_step
        self._seen = 0
        self._began = 0.0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            save_plan(self.run_dir / "plan.json", self.plan)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.micro_steps or self._seen > WARM_UP_STEPS + MEASURED_STEPS:
            return
        self._seen += 1
        if self._seen == WARM_UP_STEPS:
            self._began = time.perf_counter()
        elif self._seen == WARM_UP_STEPS + MEASURED_STEPS and trainer.is_global_zero:
            seconds = (time.perf_counter() - self._began) / MEASURED_STEPS
            append_event(
                self.run_dir,
                "speed",
                phase=self.plan.phase,
                step_seconds=seconds,
                tokens_per_s=self.tokens_per_step / seconds,
            )
