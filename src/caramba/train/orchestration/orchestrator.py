"""The orchestrator of a phase: what it does at a boundary, with its state."""

from __future__ import annotations

import dataclasses
import math
import resource
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from caramba.config.optimizer import trial_steps
from caramba.config.train import PhaseConfig
from caramba.errors import CarambaError
from caramba.optim.clip import tensor_norms
from caramba.optim.groups import copies_of
from caramba.optim.nowcast import FORECASTS, Snapshots
from caramba.optim.portfolio import Portfolio
from caramba.runtime import is_distributed
from caramba.train.orchestration.interval import compute_interval
from caramba.train.orchestration.journal import Journal
from caramba.train.orchestration.policies import Choice, Gains, choose
from caramba.train.orchestration.trials import Fork, TrialData, Trials

SLOPE_OVER = 50
NOWCAST_AHEAD = 1.0
"""Spacings of snapshots that a forecast goes past the last one."""


class Orchestrator:
    """Decides at every `orchestrator_decision_interval` steps of a phase which strategy steps next.

    All ranks compute the same decision from reduced scores, and stop if they differ. Between decisions it only keeps
    the losses of steps, on the device.
    """

    def __init__(
        self,
        phase: PhaseConfig,
        journal: Journal,
        data: TrialData | None,
        replayed: Mapping[int, str] | None = None,
    ) -> None:
        self.phase, self.journal, self.data, self.replayed = phase, journal, data, replayed
        self.decided, self.last_switch, self.left = 0, -(10**9), ""
        self.trial_steps, self.trial_seconds = 0, 0.0
        self.gains = Gains()
        self.losses: deque[Tensor] = deque(maxlen=SLOPE_OVER)
        self.ratio: Tensor | None = None  # of the last update that was looked at to the weights, []
        self._before: list[Tensor] | None = None
        interval = phase.orchestrator_decision_interval
        self.snapshots = Snapshots(interval) if phase.orchestrator_use_nowcasting else None

    def is_due(self, step: int) -> bool:
        """Whether a decision comes before step `step` (0-based)."""
        interval = self.phase.orchestrator_decision_interval
        return step > self.decided and step % interval == 0 and step < self.phase.steps

    def decide(self, step: int, module: Any, portfolio: Portfolio, device: torch.device) -> str:
        """Take the decision before step `step`, record it and return the strategy that steps next."""
        self.decided = step
        seen = self._telemetry(portfolio, device)
        cost = {"steps": 0, "seconds": 0.0}
        jump = None
        if self.phase.orchestrator_mode == "monitor":
            found = Choice(portfolio.active, "monitor: nothing is changed")
        elif self.replayed is not None:
            found = self._replay(step, portfolio)
        else:
            found, cost, jump = self._try(step, module, portfolio, device)
        agree(step, found.choice)
        active = portfolio.active
        if found.choice != active:
            portfolio.switch(found.choice)
            self.last_switch, self.left = step, active
        values = {"strategy": active, **found.record(), "cost": cost, "nowcast": jump, "inputs": seen}
        self.journal.add(step, **values)
        return found.choice

    def _replay(self, step: int, portfolio: Portfolio) -> Choice:
        assert self.replayed is not None
        name = self.replayed.get(step, portfolio.active)
        if not portfolio.is_ready(name):
            raise CarambaError(
                f"step {step}: replay switches from {portfolio.active} to {name}, which has seen too few steps; the "
                "decisions are of another run"
            )
        return Choice(name, "replay")

    def _try(
        self, step: int, module: Any, portfolio: Portfolio, device: torch.device
    ) -> tuple[Choice, dict[str, Any], dict[str, Any] | None]:
        phase, active = self.phase, portfolio.active
        none = {"steps": 0, "seconds": 0.0}
        since = step - self.last_switch
        if since < phase.orchestrator_min_steps_between_switches:
            return Choice(active, f"{since} steps after a switch: too soon"), none, None
        challengers = [
            name
            for name, one in phase.orchestrator_strategies.items()
            if name != active and one != portfolio.strategy and portfolio.is_ready(name)
        ]
        equal = [
            name
            for name, one in phase.orchestrator_strategies.items()
            if name != active and one == portfolio.strategy
        ]
        challengers += equal  # tried like others: their trials are equal to the bit
        jumps = self.snapshots is not None and self.snapshots.is_enough(step)
        if self.data is None or not (challengers or jumps):
            return Choice(active, "no other strategy is ready"), none, None
        needed, most = trial_steps(phase, len(challengers)), phase.orchestrator_budget * phase.steps
        if self.trial_steps + needed > most:
            spent = (
                f"{self.trial_steps} of {most:.0f} steps of the budget are spent, a decision takes {needed}"
            )
            return Choice(active, spent), none, None
        fork, trials = Fork(module, portfolio, device), Trials(module, portfolio, self.data, device)

        def score(name: str, horizon: int, repeat: int, half: int | None) -> float:
            return trials.score(fork, name, step, horizon=horizon, repeat=repeat, half=half)

        found = Choice(active, "no other strategy is ready")
        if challengers:
            found = choose(phase, active, challengers, score, gains=self.gains, left=self.left or None)
        jump = self._nowcast(step, module, trials, fork, found.choice)
        self.trial_steps += trials.steps
        self.trial_seconds += trials.seconds
        tokens = trials.steps * self.data.per_step * phase.block_size
        return found, {"steps": trials.steps, "seconds": round(trials.seconds, 4), "tokens": tokens}, jump

    def _nowcast(
        self, step: int, module: Any, trials: Trials, fork: Fork, name: str
    ) -> dict[str, Any] | None:
        """Jump to forecast weights if that beats the same steps without it, paired; else leave them."""
        if self.snapshots is None or not self.snapshots.is_enough(step):
            return None
        form = list(FORECASTS)[(step // self.phase.orchestrator_decision_interval) % len(FORECASTS)]
        parameters = [p for _, p in module.objective.trainable()]
        forecast = self.snapshots.forecast(form, NOWCAST_AHEAD, parameters)

        @torch.no_grad()
        def jump() -> None:
            for p, value in zip(parameters, forecast, strict=True):
                p.copy_(value)

        horizon, differences = self.phase.orchestrator_eval_horizon, []
        for repeat in range(1, self.phase.orchestrator_repeats + 1):
            with_it, without = (
                trials.score(fork, name, step, horizon=horizon, repeat=repeat, half=None, before=before)
                for before in (jump, None)
            )
            differences.append(with_it - without if math.isfinite(with_it) else math.inf)
        interval = compute_interval(differences)
        is_kept = interval.high < 0
        if is_kept:
            jump()
        self.snapshots.clear()
        ends = [interval.mean, interval.low, interval.high]
        return {"form": form, "differences": differences, "interval": ends, "kept": is_kept}

    def watch_step(self, step: int, parameters: list[Any]) -> None:
        """Look at the step before a decision: how much it changes the weights."""
        if (step + 1) % self.phase.orchestrator_decision_interval == 0:
            self._before = copies_of(parameters)

    @torch.no_grad()
    def after_step(self, step: int, loss: Tensor, parameters: list[Any]) -> None:
        """Keep what a decision reads; `step` steps are done."""
        self.losses.append(loss.detach().clone())
        if self.snapshots is not None and self.snapshots.is_due(step):
            self.snapshots.take(step, parameters)
        before, self._before = self._before, None
        if before is not None:
            held = tensor_norms(before).norm()
            torch._foreach_sub_(before, parameters)  # pyright: ignore[reportPrivateImportUsage]
            self.ratio = tensor_norms(before).norm() / held

    def _telemetry(self, portfolio: Portfolio, device: torch.device) -> dict[str, Any]:
        losses = self._read_losses(device)
        n, ratio = len(losses), self._read_ratio()
        slope = None
        if n > 1:
            middle = (n - 1) / 2
            norm = sum((at - middle) ** 2 for at in range(n))
            slope = sum((at - middle) * loss for at, loss in enumerate(losses)) / norm
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        return {
            "loss": losses[-1] if losses else None,
            "loss_slope": slope,
            "gradient_noise": gradient_noise(portfolio),
            "update_over_weight": ratio,
            "device_peak_bytes": peak,
            "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    def _read_losses(self, device: torch.device) -> list[float]:
        return torch.stack([loss.to(device) for loss in self.losses]).tolist() if self.losses else []

    def _read_ratio(self) -> float | None:
        ratio = math.nan if self.ratio is None else float(self.ratio)
        return ratio if math.isfinite(ratio) else None

    def state_dict(self) -> dict[str, Any]:
        return {
            "decided": self.decided,
            "last_switch": self.last_switch,
            "left": self.left,
            "trial_steps": self.trial_steps,
            "trial_seconds": self.trial_seconds,
            "gains": dataclasses.asdict(self.gains),
            "losses": [float(loss) for loss in self.losses],
            "ratio": self._read_ratio(),
            "snapshots": None if self.snapshots is None else self.snapshots.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.decided, self.last_switch, self.left = state["decided"], state["last_switch"], state["left"]
        self.trial_steps, self.trial_seconds = state["trial_steps"], state["trial_seconds"]
        self.gains = Gains(**state["gains"])
        self.losses.extend(torch.tensor(loss) for loss in state["losses"])
        self.ratio = None if state["ratio"] is None else torch.tensor(state["ratio"])
        if self.snapshots is not None and state["snapshots"] is not None:
            self.snapshots.load_state_dict(state["snapshots"])

    def cost(self, tokens_per_step: int) -> dict[str, float]:
        """Return what trials have cost the phase, next to its own steps."""
        return {
            "trial_steps": float(self.trial_steps),
            "trial_tokens": float(self.trial_steps * tokens_per_step),
            "trial_seconds": self.trial_seconds,
        }

    def report(self, kind: str, step: int, **values: Any) -> None:
        """Record an answer of the guard to a spike at step `step`."""
        self.journal.add(
            step, choice=str(values.pop("strategy", "")), reason=f"safety: {kind}", safety=kind, **values
        )


def gradient_noise(portfolio: Portfolio) -> float | None:
    """Return 1 - |mean g|^2 / mean |g|^2 over weights with both averages: 0 without noise, near 1 of noise alone."""
    mean = square = 0.0
    for group in portfolio.param_groups:
        states = [state for p in group["params"] if (state := portfolio.state.get(p))]
        if group["family"] != "adamw" or not states:
            continue
        means, squares, steps = (
            [state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step")
        )
        sums = torch._foreach_norm(squares, 1)  # pyright: ignore[reportPrivateImportUsage] none is below 0
        read = torch.stack([tensor_norms(means).square(), torch.stack(sums), torch.stack(steps)]).tolist()
        beta1, beta2 = group["betas"]
        for own, total, n in zip(*read, strict=True):
            mean += own / (1 - beta1**n) ** 2
            square += total / (1 - beta2**n)
    return 1.0 - mean / square if square else None


def agree(step: int, choice: str) -> None:
    """Check that every rank has decided as rank 0 has.

    Raises:
        CarambaError: they differ, with both decisions.
    """
    if not is_distributed():
        return
    found: list[Any] = [torch.zeros(64, dtype=torch.uint8) for _ in range(dist.get_world_size())]
    own = torch.zeros(64, dtype=torch.uint8)
    text = choice.encode()[:64]
    own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    if dist.get_backend() == "nccl":
        own, found = own.cuda(), [one.cuda() for one in found]
    dist.all_gather(found, own)
    names = [bytes(one.tolist()).rstrip(b"\0").decode(errors="replace") for one in found]
    for rank, name in enumerate(names):
        if name != names[0]:
            raise CarambaError(
                f"step {step}: rank 0 decided for {names[0]!r} and rank {rank} for {name!r}, though both read the same "
                "scores; their weights differ: resume from the last saved state"
            )
