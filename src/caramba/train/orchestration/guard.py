"""Safety: spikes of loss, gradient and update by robust z-scores, answered by clip, skip and rollback, each capped."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from caramba.config.train import PhaseConfig
from caramba.errors import CheckpointError
from caramba.optim import learning_rate
from caramba.optim.clip import Deferred, scale_gradients
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
LARGEST = float(torch.finfo(torch.float32).max)


class RobustScore:
    """Distance of a value from the median of the last ones in scaled median absolute deviations, of logarithms."""

    def __init__(self) -> None:
        self.values: deque[float] = deque(maxlen=WINDOW)

    def _place(self) -> tuple[float, float]:
        logs = [math.log(x) for x in self.values]
        middle = statistics.median(logs)
        return middle, max(1.4826 * statistics.median([abs(x - middle) for x in logs]), 1e-3)

    def __call__(self, value: float) -> float:
        """Return the z-score; 0 while there are few values, infinity for one that is not finite."""
        if not math.isfinite(value):
            return math.inf
        if len(self.values) < LEAST or value <= 0:
            return 0.0
        middle, spread = self._place()
        return (math.log(value) - middle) / spread

    def limit(self, z: float, least: float) -> float:
        """Return the value whose score is `z`, or `least` times the median if that is larger.

        Infinity while there are few values.
        """
        if len(self.values) < LEAST:
            return math.inf
        middle, spread = self._place()
        return max(math.exp(min(middle + z * spread, 700.0)), least * self.median())

    def median(self) -> float:
        return statistics.median(self.values) if self.values else math.nan

    def add(self, value: float) -> None:
        if math.isfinite(value) and value > 0:
            self.values.append(value)


@dataclass
class Snapshot:
    """Weights, [n] of all parameters, and optimiser at a step."""

    step: int
    weights: Tensor
    captured: dict[str, Any] = field(repr=False)


class Limits(NamedTuple):
    """What the device answers a step by, in float32: above them the gradient is left out, by `loss` and `norm`, or
    scaled to norm `target`, by `clip`; an update not below `update` is undone."""

    loss: float
    norm: float
    clip: float
    target: float
    update: float


class Seen(NamedTuple):
    """A step whose loss, norm of the gradient and norm of the update the host reads at the next."""

    step: int
    limits: Limits
    lr: float
    values: Deferred


class Guard:
    """Watches every step of a phase; `nonfinite` watches what is not finite.

    - A gradient far above those before it is clipped to their median norm.
    - Where the loss or gradient is further out the gradient counts as 0: averages alone make the step.
    - A step whose update is far larger than those before it is undone. After a second one within PATIENCE steps the
      states go back to a snapshot, since they make such updates, and after a third the weights as well.
    - A loss that stays above `orchestrator_max_loss_increase` times its median goes back as well.

    The host does not wait for the device. It sends the limits of a step, by the values up to the step before; the
    device compares and answers. The host reads at step t + 1 what was answered at t, reports it, and goes back if need
    be, one step late: the gradient of t + 1 is then dropped if it was of the weights that were left.

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
        self._weights = [Flat(parameters), Flat(parameters)]  # before a step and after it
        self._open: tuple[Limits, Tensor, Tensor] | None = None
        self._seen: Seen | None = None

    @torch.no_grad()
    def allows(self, step: int, loss: Tensor, norm: Tensor) -> bool:
        """Scale the gradients of a step by its loss and norm, on the device.

        False if they are to be dropped: the weights have gone back from where they were taken.
        """
        self._open = None
        if self.catch_up():
            return False
        self._take_snapshot(step)
        limits = self._limits(step)
        host = torch.tensor(limits, dtype=torch.float32, pin_memory=loss.is_cuda)
        sent = host.to(loss.device, non_blocking=True)
        seen = torch.stack([loss.detach().float(), norm.to(loss.device).float()])
        size = seen[1]
        applied = size if self.phase.max_grad_norm is None else size.clamp(max=self.phase.max_grad_norm)
        scale = (sent[3] / applied).clamp(max=1.0).masked_fill(size <= sent[2], 1.0)
        scale_gradients(self.portfolio, scale.masked_fill((seen > sent[:2]).any(), 0.0))
        self._weights[0].read()
        self._open = Limits(*host.tolist()), sent, seen
        return True

    @torch.no_grad()
    def check_update(self, step: int) -> None:
        """Undo the step that was just taken, on the device, if its update is too large."""
        opened, self._open = self._open, None
        if opened is None:
            return
        limits, sent, seen = opened
        before, after = self._weights
        after.read()
        size = torch.linalg.vector_norm(after.values - before.values)
        if math.isfinite(limits.update):
            torch.where(size <= sent[4], after.values, before.values, out=after.values)
            after.write()
        values = Deferred(torch.cat([seen, size.float().view(1)]))
        self._seen = Seen(step, limits, self.read_scheduled_lr(step), values)

    def catch_up(self) -> bool:
        """Read the last step, if that was not done yet, and answer it; return whether the weights have gone back."""
        seen, self._seen = self._seen, None
        if seen is None:
            return False
        step, limits, lr, values = seen
        value, size, moved = values.read()
        if not (math.isfinite(value) and math.isfinite(size)):
            return False  # `nonfinite` decides
        z_loss, z_norm = self.loss(value), self.norm(size)
        increase = self.phase.orchestrator_max_loss_increase
        ready = len(self.loss.values) >= LEAST
        self.high = self.high + 1 if ready and value > increase * self.loss.median() else 0
        if self.high >= PATIENCE and self._may("rollback"):
            self._go_back(step, loss=value, z=z_loss, why=f"loss above {increase:g} times its median")
            return True
        is_left_out = value > limits.loss or size > limits.norm
        if is_left_out:
            self.counts["skip"] += 1
            self.report("skip", step, loss=value, grad_norm=size, z_loss=z_loss, z_grad_norm=z_norm)
        elif size > limits.clip:
            self.counts["clip"] += 1
            most = self.phase.max_grad_norm
            applied = size if most is None else min(size, most)
            self.report("clip", step, grad_norm=size, to=min(limits.target, applied), z_grad_norm=z_norm)
        else:
            self.norm.add(size)
        if not is_left_out:
            self.loss.add(value)
        if math.isfinite(limits.update):
            if not moved <= limits.update:
                return self._follow_undo(step, moved / lr)
            if not is_left_out:
                self.update.add(moved / lr)
        return False

    def _limits(self, step: int) -> Limits:
        """Return the limits of a step; infinite where an answer's cap is reached, or there is no update to look at."""
        lr, has_lr = self.read_scheduled_lr(step), bool(self.portfolio.param_groups[0]["lr"])
        skips = self.counts["skip"] < MOST["skip"]
        update = min(self.update.limit(UNDO_AT, LEAST_UPDATE_FACTOR) * lr, LARGEST)
        return Limits(
            self.loss.limit(LOSS_AT, LEAST_LOSS_FACTOR) if skips else math.inf,
            self.norm.limit(SKIP_AT, LEAST_FACTOR) if skips else math.inf,
            self.norm.limit(CLIP_AT, LEAST_FACTOR) if self.counts["clip"] < MOST["clip"] else math.inf,
            self.norm.median(),
            update if has_lr and self.counts["undo"] < MOST["undo"] else math.inf,
        )

    def read_scheduled_lr(self, step: int) -> float:
        """Return the lr of the schedule, which updates are relative to."""
        own = self.portfolio.param_groups[0]["lr"]
        if not isinstance(self.phase.scheduler, str):
            return own
        return learning_rate(self.phase, min(step, self.phase.steps - 1)) or own

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
        weights = Flat(self.parameters)
        weights.read()
        taken = Snapshot(step, weights.values, self.portfolio.capture())
        self.snapshots = [*self.snapshots[-1:], taken]

    def _follow_undo(self, step: int, update: float) -> bool:
        """Go back with more than the weights, which the device has put back, where that was not enough for the step
        after it; return whether they go further back."""
        self.counts["undo"] += 1
        z = self.update(update)
        in_a_row = step - self.last_undo <= PATIENCE
        self.undos, self.last_undo = (self.undos + 1 if in_a_row else 1), step
        values = {"update": update, "z": z, "why": "update far larger than those before"}
        if self.undos == 1:
            self.report("undo", step, back_to=step, strategy=self.portfolio.active, **values)
        else:
            self._go_back(step, kind="undo", weights_stay=self.undos == 2, **values)
        return self.undos > 2

    @torch.no_grad()
    def _go_back(self, step: int, *, kind: str = "rollback", weights_stay: bool = False, **values: Any) -> None:
        least = 2 if kind == "undo" else PATIENCE
        old_enough = [one for one in self.snapshots if step - one.step >= least]
        target = (old_enough or self.snapshots)[-1]
        if not weights_stay:
            Flat(self.parameters, target.weights).write()
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
            "seen": self._seen and [*self._seen[:1], list(self._seen.limits), self._seen.lr, self._seen.values.read()],
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
        """Continue from a state.

        Raises:
            CheckpointError: it is of a version that answered a step before the next began.
        """
        if "seen" not in state:
            raise CheckpointError(
                "orchestrator: the saved state is of an earlier version, whose answers came within their step; start "
                "the phase again, or resume with that version"
            )
        for name in ("loss", "norm", "update"):
            score = RobustScore()
            score.values.extend(state[name])
            setattr(self, name, score)
        self.counts, self.high = dict(state["counts"]), state["high"]
        self.undos, self.last_undo = state["last_undo"]
        seen = state["seen"]
        if seen is not None:
            step, limits, lr, values = seen
            self._seen = Seen(step, Limits(*limits), lr, Deferred(torch.tensor(values)))
        self.snapshots = []
        for one in state["snapshots"]:
            states, groups = one["captured"]["kept"]
            kept = (
                {self.parameters[at]: _on(self.parameters[at], own) for at, own in states.items()},
                groups,
            )
            captured = {**one["captured"], "kept": kept}
            weights = one["weights"].to(self.parameters[0].device)
            self.snapshots.append(Snapshot(one["step"], weights, captured))


def _on(parameter: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
    """Return a weight's state on its device, after it was read from a file."""
    return {key: value.to(parameter.device) if isinstance(value, Tensor) else value for key, value in state.items()}


class Flat:
    """Weights in one tensor, [n], that all are read into and written from by one launch."""

    def __init__(self, parameters: list[nn.Parameter], values: Tensor | None = None) -> None:
        self.parameters: list[Tensor] = list(parameters)
        dtypes = {p.dtype for p in parameters}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        sizes = [p.numel() for p in parameters]
        self.values = torch.empty(sum(sizes), dtype=dtype, device=parameters[0].device) if values is None else values
        parts = self.values.split(sizes)
        self.parts = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]

    def read(self) -> None:
        torch._foreach_copy_(self.parts, self.parameters)  # pyright: ignore[reportPrivateImportUsage]

    def write(self) -> None:
        torch._foreach_copy_(self.parameters, self.parts)  # pyright: ignore[reportPrivateImportUsage]
