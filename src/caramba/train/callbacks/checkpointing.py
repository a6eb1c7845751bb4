"""When a phase's state and weights are saved: the last ones, those of the lowest held-out losses, the final ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from signal import Signals
from typing import Any

import lightning.pytorch as pl

from caramba.config.trainer import TrainerConfig
from caramba.data.checkpoint import index_tensors, stream_into
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

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.micro_steps == 0 and not (self.eval_every and trainer.global_step % self.eval_every == 0):
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


Save = Callable[[str], None]


class KeptWeights(pl.Callback):
    """Saves weights as `folder`/NAME.safetensors by `save(NAME)`, and deletes those that are no longer kept.

    What is kept is part of the training state, so a resumed phase has the same files. It runs before the state is
    saved.
    """

    def __init__(self, config: TrainerConfig, save_every: int | None, folder: Path, phase: str, save: Save) -> None:
        self.config, self.save_every, self.save = config, save_every, save
        self.folder, self.phase = folder, phase
        self.top_k = max(config.save_top_k, int(config.restore_best))
        self.best: list[tuple[float, int, str]] = []  # held-out loss, step, name; lowest loss first
        self.last: list[tuple[int, str]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if pl_module.micro_steps or not self.config.save_last_k or not self.save_every:
            return
        if step % self.save_every == 0 and all(step != known for known, _ in self.last):
            self.last.append((step, self._write(trainer, pl_module, f"step{step}")))
            while len(self.last) > self.config.save_last_k:
                self._file(self.last.pop(0)[1]).unlink(missing_ok=True)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        loss = float(trainer.callback_metrics["val_loss"])
        if not self.top_k or not (len(self.best) < self.top_k or loss < self.best[-1][0]):
            return
        step = trainer.global_step
        self.best.append((loss, step, self._write(trainer, pl_module, f"best-step{step}")))
        self.best.sort()
        while len(self.best) > self.top_k:
            self._file(self.best.pop()[2]).unlink(missing_ok=True)

    def _write(self, trainer: pl.Trainer, pl_module: Any, name: str) -> str:
        name = f"{self.phase}-{name}"
        pl_module.refuse_divergence()
        if not trainer.is_global_zero:
            return name
        average = pl_module.average
        if average is not None:  # what is validated, and what the phase would save
            average.swap_in()
        self.save(name)
        if average is not None:
            average.swap_out()
        return name

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def restore(self, pl_module: Any) -> int | None:
        """Load the best weights, where that is asked for; return their step."""
        if not self.config.restore_best or not self.best:
            return None
        pl_module.held_out, step, name = self.best[0]
        file = self._file(name)
        stream_into(pl_module.model, index_tensors((file,)), where=str(file))
        return step

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "last": self.last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = [tuple(item) for item in state_dict["best"]]
        self.last = [tuple(item) for item in state_dict["last"]]
