"""Console progress of a phase, and the rows of metrics that go to the loggers."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl

from caramba.console import logger


class ThroughputProgress(pl.Callback):
    """Logs loss, learning rate, gradient norm and tokens/s every `log_every` steps; draws a bar or prints lines."""

    def __init__(self, phase: str, steps: int, tokens_per_step: int, instrument: str) -> None:
        self.phase, self.steps, self.tokens_per_step, self.instrument = (
            phase,
            steps,
            tokens_per_step,
            instrument,
        )
        self._bar: Any = None
        self._task: Any = None
        self._clock = (0, 0.0)
        self._paused = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._clock = (trainer.global_step, time.perf_counter())
        if self.instrument == "rich" and trainer.is_global_zero and logger.is_terminal:
            self._bar = logger.progress_bar()
            self._bar.__enter__()
            self._task = self._bar.add_task(
                self.phase, total=self.steps, completed=trainer.global_step, loss="", rate=""
            )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if pl_module.micro_steps or (step % pl_module.log_every and step != self.steps):
            return
        since, clock = self._clock
        now = time.perf_counter()
        rate = (step - since) * self.tokens_per_step / max(now - clock, 1e-9)
        self._clock = (step, now)
        loss = pl_module.running_loss()
        values = {key: float(value) for key, value in outputs.items()}
        values |= {
            "running_loss": loss,
            "tokens_per_s": rate,
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
        }
        pl_module.record(values)
        self._show(step, loss, rate)

    def _show(self, step: int, loss: float, rate: float) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step, loss=f"loss {loss:.4f}", rate=f"{rate:,.0f} tok/s")
        elif self.instrument != "none" and (step == self.steps or step % max(10, self.steps // 10) < 10):
            logger.training_step(self.phase, step, loss, {"steps": self.steps, "tok/s": round(rate)})

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._paused = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        step, clock = self._clock  # validation is not training time
        self._clock = (step, clock + time.perf_counter() - self._paused)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
            self._bar = None
