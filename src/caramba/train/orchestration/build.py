"""The orchestrator of a phase as seen by Lightning: how it is built, what is refused, and when it decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from caramba.config.optimizer import portfolio_bytes, runs_trials
from caramba.config.train import PhaseConfig
from caramba.data.checkpoint.network import spec_of
from caramba.errors import ConfigError
from caramba.optim.portfolio import Portfolio
from caramba.runtime import free_bytes, is_main_process
from caramba.train.orchestration.guard import Guard
from caramba.train.orchestration.orchestrator import (
    DECISIONS,
    Journal,
    Orchestrator,
    choices_to_replay,
    digest_of,
)
from caramba.train.orchestration.trials import TrialData


class Orchestration(pl.Callback):
    """Decides before the first micro-batch of a step, so that a state that was saved at the step decides again.

    It comes before what saves states: they hold the budget, what was decided, and the guard's snapshots.
    """

    def __init__(self, orchestrator: Orchestrator) -> None:
        self.orchestrator = orchestrator
        self.guard: Guard | None = None
        self._guard_state: dict[str, Any] | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        portfolio = trainer.optimizers[0]
        assert isinstance(portfolio, Portfolio)
        self.portfolio = portfolio
        self.parameters = [p for _, p in pl_module.objective.trainable()]
        self.orchestrator.journal.keep_before(trainer.global_step)
        if pl_module.phase.orchestrator_mode == "active":
            self.guard = pl_module.guard = Guard(pl_module.phase, portfolio, self.parameters, self.orchestrator.report)
            if self._guard_state is not None:
                self.guard.load_state_dict(self._guard_state)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.micro_steps:
            return
        orchestrator, step = self.orchestrator, trainer.global_step
        if orchestrator.is_due(step):
            if self.guard is not None:
                self.guard.catch_up()
            before = self.portfolio.active
            choice = orchestrator.decide(step, pl_module, self.portfolio, trainer.strategy.root_device)
            if choice != before and self.guard is not None:
                self.guard.forget_update()
        orchestrator.watch_step(step, self.parameters)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.micro_steps:
            return
        if self.guard is not None and trainer.global_step >= pl_module.phase.steps:  # no later step will
            self.guard.catch_up()
        self.orchestrator.after_step(trainer.global_step, outputs["loss"], self.parameters)

    def state_dict(self) -> dict[str, Any]:
        guard = None if self.guard is None else self.guard.state_dict()
        return {"orchestrator": self.orchestrator.state_dict(), "guard": guard}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.orchestrator.load_state_dict(state_dict["orchestrator"])
        self._guard_state = state_dict["guard"]


def build_orchestration(
    phase: PhaseConfig,
    name: str,
    data: Any,
    objective: Any,
    *,
    run_dir: Path,
    per_step: int,
    share: tuple[int, int],
    device: torch.device,
) -> Orchestration:
    """Return the callback that orchestrates a phase.

    Raises:
        ConfigError: its states do not fit, no window is left to score by, or decisions are of another manifest.
    """
    refuse_too_large(phase, sum(p.numel() for _, p in objective.trainable()), device)
    digest = digest_of(phase, spec_of(objective.model.spec).model_dump_json(), data.train, data.seed, data.start)
    replayed = None
    if phase.orchestrator_decisions is not None:
        path = Path(phase.orchestrator_decisions)
        replayed = choices_to_replay(path, name, digest, phase.orchestrator_strategies)
    windows = None
    if runs_trials(phase):
        windows = TrialData(data.train, phase, seed=data.seed, start=data.start, per_step=per_step, share=share)
    journal = Journal(run_dir / DECISIONS, name, digest, writes=is_main_process())
    return Orchestration(Orchestrator(phase, journal, windows, replayed))


def refuse_too_large(phase: PhaseConfig, weights: int, device: torch.device) -> None:
    """Check that states and copies of a portfolio fit next to the weights.

    Raises:
        ConfigError: they do not, with the bytes.
    """
    needed, free = portfolio_bytes(phase, weights), free_bytes(device)
    if sum(needed.values()) > free:
        raise ConfigError(
            f"train.orchestrator_enabled: states of the portfolio take {needed['states']:,} bytes and copies for "
            f"trials and rollback {needed['copies']:,}, expected at most the {free:,} free on {device}; use fewer "
            "orchestrator_strategies, or a smaller model"
        )
