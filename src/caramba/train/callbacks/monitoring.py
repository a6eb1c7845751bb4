"""The monitors, statistics of memory slots and `debug=profile` as seen by Lightning: when each is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from caramba.console import logger
from caramba.model import Model
from caramba.model.memory import STATISTICS
from caramba.runtime import merge_over_ranks
from caramba.train.display import Display
from caramba.train.throughput import PeakMemory, PhaseMeter, PhaseProfile, StepNorms, norms_of_stages

NORMS_EVERY = 50  # a copy of what trains and two passes over it: a thousandth of a step's time at this rate


class Monitoring(pl.Callback):
    """Records loss, learning rate, speed, MFU, waiting for data, norms and memory every `log_every` steps.

    Values are read from the device first, so that the clock is read when the step is done. Without a display nothing
    is printed.
    """

    def __init__(
        self,
        meter: PhaseMeter,
        memory: PeakMemory,
        display: Display | None,
        steps: int,
        peak: Callable[[], float | None],
    ) -> None:
        self.meter, self.memory, self.display, self.steps = meter, memory, display, steps
        self.peak = peak
        self._norms: StepNorms | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.meter.peak_flops = self.peak()  # now that the precision of products is set
        self.memory.reset()
        copies = {id(parameter) for parameter in pl_module.objective.replicated_params()}
        self._norms = StepNorms(
            [pair for pair in pl_module.objective.trainable() if id(pair[1]) not in copies],
            is_due=lambda: self._is_due(trainer.global_step + 1, NORMS_EVERY),
            has_room=self.memory.leaves_room_for,
        )
        for optimizer in trainer.optimizers:
            self._norms.attach(optimizer)
        if self.display is not None:
            self.display.open(trainer.global_step)
        self.meter.start(trainer.global_step)

    def _is_due(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self.steps

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if pl_module.micro_steps or not (self._is_due(step, pl_module.log_every) or pl_module.has_converged):
            return
        assert self._norms is not None
        values = {key: float(value) for key, value in outputs.items()}
        if pl_module.shares_blocks:
            values = merge_over_ranks(values)
        values["running_loss"] = pl_module.running_loss()
        values["lr"] = pl_module.rate
        norms = self._norms.read()
        values |= norms_of_stages(norms) if pl_module.has_stages else norms
        values |= self.meter.read(step) | self.memory.read()
        pl_module.record(values)
        if self.display is not None:
            self.display.show(step, values)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.meter.pause()  # validation is not training time

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.meter.resume()
        if self.display is not None:
            self.display.keep_held_out(trainer.callback_metrics.get("val_loss"))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.memory.read()
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._norms is not None:
            self._norms.detach()
        if self.display is not None:
            self.display.close()

    def state_dict(self) -> dict[str, Any]:
        return {"meter": self.meter.state_dict(), "memory": self.memory.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.meter.load_state_dict(state_dict["meter"])
        self.memory.load_state_dict(state_dict["memory"])


ROWS = 8
"""Sequences of the first held-out batch that are measured."""


class SlotStatistics(pl.Callback):
    """Records `memory_KEY` of a model's memory slots after each validation, on the first rows of held-out text.

    `write` gets the step and the read mass per slot, by layer. More than half of the slots dead is warned of once.
    """

    def __init__(self, model: Model, write: Callable[[int, dict[str, list[list[float]]]], None]) -> None:
        self.model, self.write = model, write
        self._tokens: Tensor | None = None

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx == 0:
            self._tokens = batch[0][:ROWS]

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self._tokens is None or pl_module.has_stages or not trainer.is_global_zero:
            return
        stats = self.model.get_memory_stats(self._tokens)
        pl_module.record({f"memory_{key.removeprefix('memory_')}": stats[key] for key in STATISTICS})
        by_layer = {name: use["read_mass"].tolist() for name, use in stats["layers"].items()}
        self.write(trainer.global_step, by_layer)


class Profiling(pl.Callback):
    """Profiles a few steady steps of the phase and logs the path of the files."""

    def __init__(self, folder: Path, phase: str) -> None:
        self.folder, self.phase = folder, phase
        self._profile: PhaseProfile | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            left = trainer.max_steps - trainer.global_step
            self._profile = PhaseProfile(self.folder, self.phase, left, trainer.strategy.root_device)
            self._profile.start()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._profile is not None and pl_module.micro_steps == 0:
            self._profile.begin_step()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._profile is not None and pl_module.micro_steps == 0:
            self._profile.end_step()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()
            if profile.has_written:
                logger.path(self.folder, "profile")
            else:
                logger.warning(
                    f"{self.phase}: ended before its profiled steps; nothing is written, raise debug.max_steps"
                )

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()
