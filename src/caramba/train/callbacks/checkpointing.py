"""When a phase's state and final weights are saved, and when training stops because the system asks for its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from signal import Signals
from typing import Any

import lightning.pytorch as pl

from caramba.errors import Preempted
from caramba.runs.exit_codes import stop_signal
from caramba.runtime import SignalAgreement


class Checkpointing(pl.Callback):
    """Saves resumable state every `save_every` optimiser steps, and the final weights when training ends.

    At a step that is validated, every `eval_every`, the state is saved after that: a resumed run does not validate the
    step that it resumes from again, and would otherwise lack the row.
    No state is saved at the last step: Lightning has no step left to resume there, and would never come to the
    final weights. A run stopped after it repeats the steps since the state before. The final weights are saved
    before any other work of the phase's end, so that a failure there loses nothing.

    A signal that asks the run to stop, to any of its ranks, is answered at the end of a step: all save the state, and
    then raise Preempted. Saving in the handler itself would meet weights half updated, and the other ranks elsewhere.
    """

    def __init__(
        self,
        state_path: Path,
        save_every: int | None,
        save_final: Callable[[], None],
        eval_every: int | None = None,
    ) -> None:
        self.state_path, self.save_every, self.save_final = state_path, save_every, save_final
        self.eval_every = eval_every
        self._agreement: SignalAgreement | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._agreement = SignalAgreement()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.micro_steps == 0 and not (
            self.eval_every and trainer.global_step % self.eval_every == 0
        ):
            self._save(trainer, pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._save(trainer, pl_module)

    def _save(self, trainer: pl.Trainer, pl_module: Any) -> None:
        is_due = self.save_every and trainer.global_step % self.save_every == 0
        is_last = self._has_ended(trainer, pl_module)
        stop = self._agreement.largest(stop_signal()) if self._agreement is not None else 0
        if (is_due or stop) and not is_last:
            pl_module.refuse_divergence()
            pl_module.prepare_save()
            trainer.save_checkpoint(self.state_path)
        if stop and not is_last:
            raise Preempted(Signals(stop).name)

    @staticmethod
    def _has_ended(trainer: pl.Trainer, pl_module: Any) -> bool:
        """Whether the phase is done: its last step, convergence, or a callback that set `trainer.should_stop`."""
        return trainer.global_step >= trainer.max_steps or pl_module.has_converged or trainer.should_stop

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None
        pl_module.refuse_divergence()
        if self._has_ended(trainer, pl_module):
            pl_module.finish()
            self.save_final()
