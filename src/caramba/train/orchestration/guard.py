"""Safety: spikes of loss, gradient and update by robust z-scores, answered by clip, skip and rollback, each capped."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from caramba.config.train import PhaseConfig
from caramba.optim import learning_rate
from caramba.optim.portfolio import Portfolio

WINDOW, LEAST = 32, 20
"""Steps that a score is relative to, and the fewest of them."""
CLIP_AT, SKIP_AT, LOSS_AT, UNDO_AT = 10.0, 20.0, 10.0, 4.0
"""Robust z-scores: of a gradient that is clipped, of a gradient and of a loss whose step is left out, of an update."""
LEAST_FACTOR, LEAST_LOSS_FACTOR, LEAST_UPDATE_FACTOR = 3.0, 1.25, 4.0
"""A spike is also this multiple of the median: a steady series has small deviations."""
PATIENCE = 5
"""Steps in a row with a loss above `orchestrator_max_loss_increase` times the median before a rollback."""
MOST = {"clip": 50, "skip": 20, "undo": 20, "rollback": 5}
SNAPSHOT_EVERY = 25


class RobustScore:
    """Distance of a value from the median of the last ones in scaled median absolute deviations, of logarithms."""

    def __init__(self) -> None:
        self.values: deque[float] = deque(maxlen=WINDOW)

    def __call__(self, value: float) -> float:
        """Return the z-score; 0 while there are few values, infinity for one that is not finite."""
        if not math.isfinite(value):
            return math.inf
        if len(self.values) < LEAST or value <= 0:
            return 0.0
        logs = [math.log(x) for x in self.values]
        middle = statistics.median(logs)
        spread = 1.4826 * statistics.median([abs(x - middle) for x in logs])
        return (math.log(value) - middle) / max(spread, 1e-3)

    def median(self) -> float:
        return statistics.median(self.values) if self.values else math.nan

    def add(self, value: float) -> None:
        if math.isfinite(value) and value > 0:
            self.values.append(value)


@dataclass
class Snapshot:
    """Weights and optimiser at a step."""

    step: int
    weights: list[Tensor]
    captured: dict[str, Any] = field(repr=False)


class Guard:
    """Watches every step of a phase; `nonfinite` watches what is not finite.

    - A gradient far above those before it is clipped to their median norm.
    - A step whose loss or gradient is further out is left out.
    - A step whose update is far larger than those before it is undone. After a second one within PATIENCE steps the
      states go back to a snapshot, since they make such updates, and after a third the weights as well.
    - A loss that stays above `orchestrator_max_loss_increase` times its median goes back as well.

    After going back the run continues with the next batch, by the safety strategy if there is one. Each answer is
    capped. Two snapshots are kept, on the device of the weights; the older one is gone back to if the newer one is of
    fewer than PATIENCE steps ago.
    """

    def __init__(
        self,
        phase: PhaseConfig,
        portfolio: Portfolio,
        parameters: list[nn.Parameter],
        report: Callable[..., None],
    ) -> None:
        self.phase, self.portfolio, self.parameters, self.report = phase, portfolio, parameters, report
        self.loss, self.norm, self.update = RobustScore(), RobustScore(), RobustScore()
        self.counts = dict.fromkeys(MOST, 0)
        self.undos, self.last_undo = 0, -(10**9)
        self.high = 0  # steps in a row with a high loss
        self.snapshots: list[Snapshot] = []
        self._before: list[Tensor] | None = None
        self._lr = 0.0

    def allows(self, step: int, loss: Tensor, norm: Tensor) -> bool:
        """Whether the weights may take this step; gradients may have been scaled."""
        self._before = None
        value, size = float(loss), float(norm)
        if not (math.isfinite(value) and math.isfinite(size)):
            return True  # `nonfinite` decides
        limit = self.phase.max_grad_norm
        self._take_snapshot(step)
        z_loss, z_norm = self.loss(value), self.norm(size)
        is_high = z_loss > LOSS_AT and value > LEAST_LOSS_FACTOR * self.loss.median()
        is_large = z_norm > CLIP_AT and size > LEAST_FACTOR * self.norm.median()
        increase = self.phase.orchestrator_max_loss_increase
        ready = len(self.loss.values) >= LEAST
        self.high = self.high + 1 if ready and value > increase * self.loss.median() else 0
        if self.high >= PATIENCE and self._may("rollback"):
            self._go_back(step, loss=value, z=z_loss, why=f"loss above {increase:g} times its median")
            return False
        if (is_high or (is_large and z_norm > SKIP_AT)) and self._may("skip"):
            self.report("skip", step, loss=value, grad_norm=size, z_loss=z_loss, z_grad_norm=z_norm)
            return False
        if is_large and self._may("clip"):
            target = self.norm.median()
            applied = min(size, limit) if limit is not None else size
            with torch.no_grad():
                for p in self.parameters:
                    if p.grad is not None:
                        p.grad.mul_(min(1.0, target / max(applied, 1e-30)))
            self.report("clip", step, grad_norm=size, to=min(target, applied), z_grad_norm=z_norm)
        else:
            self.norm.add(size)
        self.loss.add(value)
        self._before = [p.detach().clone() for p in self.parameters]
        self._lr = self.portfolio.param_groups[0]["lr"]
        return True

    @torch.no_grad()
    def check_update(self, step: int) -> None:
        """Look at the update of the step that was just taken."""
        before, self._before = self._before, None
        if before is None or not self._lr:
            return
        changes = torch._foreach_sub([p.detach() for p in self.parameters], before)  # pyright: ignore[reportPrivateImportUsage]
        norms = torch._foreach_norm(changes)  # pyright: ignore[reportPrivateImportUsage]
        size = float(torch.stack([norm.float() for norm in norms]).norm()) / self.read_scheduled_lr(step)
        z = self.update(size)
        is_far = not math.isfinite(size) or size > LEAST_UPDATE_FACTOR * self.update.median()
        if z > UNDO_AT and is_far and self._may("undo"):
            in_a_row = step - self.last_undo <= PATIENCE
            self.undos, self.last_undo = (self.undos + 1 if in_a_row else 1), step
            self._undo(step, before, update=size, z=z, why="update far larger than those before")
            return
        self.update.add(size)

    def read_scheduled_lr(self, step: int) -> float:
        """Return the lr of the schedule, which updates are relative to."""
        if not isinstance(self.phase.scheduler, str):
            return self._lr
        return learning_rate(self.phase, min(step, self.phase.steps - 1)) or self._lr

    def forget_update(self) -> None:
        """Forget how large updates were, when a strategy with others takes over."""
        self.update.values.clear()

    def _may(self, kind: str) -> bool:
        if self.counts[kind] >= MOST[kind]:
            return False
        self.counts[kind] += 1
        return True

    def _take_snapshot(self, step: int) -> None:
        if self.high or (self.snapshots and step - self.snapshots[-1].step < SNAPSHOT_EVERY):
            return
        weights = [p.detach().clone() for p in self.parameters]
        self.snapshots = [*self.snapshots[-1:], Snapshot(step, weights, self.portfolio.capture())]

    @torch.no_grad()
    def _undo(self, step: int, before: list[Tensor], **values: Any) -> None:
        """Put the weights before a step back; go further back where that was not enough for the step after it."""
        if self.undos > 2:
            self._go_back(step, kind="undo", **values)
            return
        if self.undos == 2:
            self._go_back(step, kind="undo", weights=before, **values)
            return
        for p, kept in zip(self.parameters, before, strict=True):
            p.copy_(kept)
        self.report("undo", step, back_to=step, strategy=self.portfolio.active, **values)

    @torch.no_grad()
    def _go_back(
        self, step: int, *, kind: str = "rollback", weights: list[Tensor] | None = None, **values: Any
    ) -> None:
        least = 2 if kind == "undo" else PATIENCE
        old_enough = [one for one in self.snapshots if step - one.step >= least]
        target = (old_enough or self.snapshots)[-1]
        for p, kept in zip(self.parameters, weights or target.weights, strict=True):
            p.copy_(kept)
        self.portfolio.restore(target.captured)
        self.high = 0
        safety = self.phase.orchestrator_safety_strategy
        if safety is not None and safety != self.portfolio.active and self.portfolio.is_ready(safety):
            self.portfolio.switch(safety)
            self.forget_update()
        self.report(kind, step, back_to=target.step, strategy=safety or self.portfolio.active, **values)

    def state_dict(self) -> dict[str, Any]:
        return {
            "loss": list(self.loss.values),
            "norm": list(self.norm.values),
            "update": list(self.update.values),
            "counts": dict(self.counts),
            "high": self.high,
            "last_undo": [self.undos, self.last_undo],
            "snapshots": [
                {"step": one.step, "weights": one.weights, "captured": self._plain(one.captured)}
                for one in self.snapshots
            ],
        }

    def _plain(self, captured: dict[str, Any]) -> dict[str, Any]:
        """Return what was captured with the places of parameters for keys."""
        places = {p: at for at, p in enumerate(self.parameters)}
        states, groups = captured["kept"]
        return {**captured, "kept": [{places[p]: state for p, state in states.items()}, groups]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("loss", "norm", "update"):
            score = RobustScore()
            score.values.extend(state[name])
            setattr(self, name, score)
        self.counts, self.high = dict(state["counts"]), state["high"]
        self.undos, self.last_undo = state["last_undo"]
        self.snapshots = []
        for one in state["snapshots"]:
            states, groups = one["captured"]["kept"]
            kept = (
                {self.parameters[at]: _on(self.parameters[at], own) for at, own in states.items()},
                groups,
            )
            captured = {**one["captured"], "kept": kept}
            self.snapshots.append(Snapshot(one["step"], one["weights"], captured))


def _on(parameter: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
    """Return a weight's state on its device, after it was read from a file."""
    return {
        key: value.to(parameter.device) if isinstance(value, Tensor) else value
        for key, value in state.items()
    }
