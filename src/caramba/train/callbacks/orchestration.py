"""When an orchestrated phase decides, and when its guard looks at a step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from caramba.optim.portfolio import Portfolio
from caramba.train.orchestration.guard import Guard
from caramba.train.orchestration.orchestrator import Orchestrator


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
            self.guard = pl_module.guard = Guard(
                pl_module.phase, portfolio, self.parameters, self.orchestrator.report
            )
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

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
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
