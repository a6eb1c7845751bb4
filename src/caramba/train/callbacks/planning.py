"""The runtime plan in Lightning: records it, and compares measurements with it."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from caramba.console import logger
from caramba.runs.events import append_event
from caramba.runtime import MemoryMeter, RuntimePlan, get_world_size, save_plan

WARM_UP_STEPS = 3
MEASURED_STEPS = 20
DEPARTURE = 0.1  # of the planned figure, above which a warning is logged
AGAIN = "; plan=refresh measures again"


class RuntimePlanning(pl.Callback):
    """Writes the phase's plan before its first step, and the speed of its first steps after warm-up as an event.

    A measured plan foretells seconds and peak memory of a step; a median that is over 10% off is warned of.
    """

    def __init__(self, plan: RuntimePlan, run_dir: Path, tokens_per_step: int) -> None:
        self.plan, self.run_dir, self.tokens_per_step = plan, run_dir, tokens_per_step
        self.foretold = plan.decisions.get("step_seconds")
        self.meter = MemoryMeter(torch.device(plan.value("device")))
        self._seconds: list[float] = []
        self._clock = 0.0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            save_plan(self.run_dir / "plan.json", self.plan)
        if self.foretold is not None:
            self.meter.start()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._clock = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.micro_steps or len(self._seconds) >= WARM_UP_STEPS + MEASURED_STEPS:
            return
        now = time.perf_counter()
        self._seconds.append(now - self._clock)
        self._clock = now
        if len(self._seconds) == WARM_UP_STEPS + MEASURED_STEPS and trainer.is_global_zero:
            self._report()

    def _report(self) -> None:
        seconds = sum(self._seconds[WARM_UP_STEPS:]) / MEASURED_STEPS
        figures = {"step_seconds": seconds, "tokens_per_s": self.tokens_per_step / seconds}
        if self.foretold is not None:
            figures |= {"planned_step_seconds": self.foretold.value, "peak_bytes": self.meter.peak_bytes()}
            seconds_now = statistics.median(self._seconds[WARM_UP_STEPS:])
            ranks = get_world_size()
            alone = f" in one process, without what {ranks} ranks exchange" if ranks > 1 else AGAIN
            self._compare("a step takes", seconds_now, self.foretold.value, "s", alone)
            planned_peak = (self.foretold.measured or {}).get("peak_bytes", 0.0)
            # Ranks share at least what was subtracted from the peak of one process, and mostly more in between.
            is_known = ranks == 1 or figures["peak_bytes"] > planned_peak
            if self.meter.device.type == "cuda" and planned_peak and is_known:
                self._compare("it peaks at", figures["peak_bytes"] / 1e9, planned_peak / 1e9, "GB", AGAIN)
        append_event(self.run_dir, "speed", phase=self.plan.phase, **figures)

    def _compare(self, what: str, found: float, planned: float, unit: str, note: str) -> None:
        departure = found / planned - 1
        if abs(departure) > DEPARTURE:
            logger.warning(
                f"{self.plan.phase}: {what} {found:.4g} {unit}, {departure:+.0%} of the {planned:.4g} {unit} that were "
                f"planned{note}"
            )
