"""The orchestrator of a phase: what it does at a boundary, with its state."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import resource
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from caramba.config.optimizer import first_decision, trial_steps
from caramba.config.train import PhaseConfig
from caramba.errors import CarambaError, ConfigError
from caramba.optim.clip import tensor_norms
from caramba.optim.groups import copies_of
from caramba.optim.nowcast import FORECASTS, Snapshots
from caramba.optim.portfolio import Portfolio
from caramba.runs.files import write_whole
from caramba.runtime import is_distributed
from caramba.train.orchestration.policies import Choice, Gains, choose, compute_interval, is_settled
from caramba.train.orchestration.trials import Fork, TrialData, Trials

DECISIONS = "decisions.jsonl"
OF_TRIALS = (
    "orchestrator_policy",
    "orchestrator_decisions",
    "orchestrator_budget",
    "orchestrator_eval_horizon",
    "orchestrator_repeats",
    "orchestrator_min_steps_between_switches",
)
"""Keys by which a run that replays decisions may differ from the run that took them."""


def digest_of(phase: PhaseConfig, spec: str, windows: Any, seed: int, start: int) -> str:
    """Return what decisions hold for: the model, the windows and their order, and the phase but for its trials."""
    trained = phase.model_dump(mode="json", exclude=set(OF_TRIALS))
    if not trained["lr_mult"]:  # decisions of before there was this key stay valid
        del trained["lr_mult"]
    n = len(windows)
    text = [windows[at][0].tolist() for at in sorted({0, n // 2, n - 1})]
    described = json.dumps([spec, n, text, trained, seed, start], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()[:16]


class Journal:
    """Writes the decisions of a phase; one rank `writes`, all keep them.

    A file is written whole at each decision: there are few. Decisions after the step that a run resumes from are taken
    again, and dropped.
    """

    def __init__(self, path: Path, phase: str, digest: str, *, writes: bool) -> None:
        self.path, self.phase, self.digest, self.writes = path, phase, digest, writes
        self.records = list(read_decisions(path)) if path.is_file() else []

    def keep_before(self, step: int) -> None:
        """Drop what this phase has recorded at `step` and later.

        Answers to the step before go as well: the guard reads it again at `step`.
        """
        self.records = [
            one for one in self.records if one["phase"] != self.phase or one["step"] < step - ("safety" in one)
        ]

    def add(self, step: int, **values: Any) -> dict[str, Any]:
        """Record one decision and return it."""
        record = {"phase": self.phase, "manifest": self.digest, "step": step, **values}
        self.records.append(_plain(record))
        if self.writes:
            lines = (json.dumps(one, ensure_ascii=False, allow_nan=False) + "\n" for one in self.records)
            write_whole(self.path, "".join(lines))
        return record


def read_decisions(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the decisions of a file.

    Raises:
        ConfigError: a line that is no decision, by its number.
    """
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            assert isinstance(record["step"], int)
            assert isinstance(record["phase"], str)
            assert isinstance(record["choice"], str)
        except (ValueError, KeyError, TypeError, AssertionError):
            raise ConfigError(
                f"{path}:{number}: expected a JSON object with phase, step and choice, got {line[:80]!r}; give the "
                "decisions.jsonl of a run"
            ) from None
        yield record


def choices_to_replay(path: Path, phase: str, digest: str, strategies: Any) -> dict[int, str]:
    """Return the strategy of each step at which an earlier run has decided.

    Raises:
        ConfigError: no such file, another manifest's, none of this phase, or an unknown strategy.
    """
    if not path.is_file():
        raise ConfigError(f"train.orchestrator_decisions={path}: no such file; give the decisions.jsonl of a run")
    own = [one for one in read_decisions(path) if one["phase"] == phase and "safety" not in one]
    if not own:
        raise ConfigError(f"{path}: has no decision of phase {phase!r}; give the file of a run with that phase")
    for one in own:
        if one.get("manifest") != digest:
            raise ConfigError(
                f"{path}: decisions of another manifest, {one.get('manifest')}, expected {digest}: model, data, seed "
                f"or the keys of phase {phase!r} differ; run them unchanged, or decide again with "
                "orchestrator_policy=halving"
            )
        if one["choice"] not in strategies:
            raise ConfigError(
                f"{path}: step {one['step']} chose {one['choice']!r}, expected one of {', '.join(strategies)}"
            )
    return {one["step"]: one["choice"] for one in own}


def _plain(value: Any) -> Any:
    """Return a value in JSON's types; NaN and infinities as strings, so that they are not lost."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


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
        self.unchanged = 0  # step of the last decision whose trials changed nothing
        self.trial_steps, self.trial_seconds = 0, 0.0
        self.gains = Gains()
        self.losses: deque[Tensor] = deque(maxlen=SLOPE_OVER)
        self.ratio: Tensor | None = None  # of the last update that was looked at to the weights, []
        self._before: list[Tensor] | None = None
        interval = phase.orchestrator_decision_interval
        self.snapshots = Snapshots(interval) if phase.orchestrator_use_nowcasting else None

    def is_due(self, step: int) -> bool:
        """Whether a decision comes before step `step` (0-based)."""
        is_boundary = step % self.phase.orchestrator_decision_interval == 0 or step == first_decision(self.phase)
        return step > self.decided and is_boundary and step < self.phase.steps

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
        if step < 2 * self.unchanged:
            return Choice(active, f"trials at step {self.unchanged} changed nothing: again from twice that"), none, None
        challengers = [
            name
            for name, one in phase.orchestrator_strategies.items()
            if name != active and one != portfolio.strategy and portfolio.is_ready(name)
        ]
        equal = [
            name for name, one in phase.orchestrator_strategies.items() if name != active and one == portfolio.strategy
        ]
        challengers += equal  # tried like others: their trials are equal to the bit
        jumps = self.snapshots is not None and self.snapshots.is_enough(step)
        if self.data is None or not (challengers or jumps):
            return Choice(active, "no other strategy is ready"), none, None
        needed, most = trial_steps(phase, len(challengers)), phase.orchestrator_budget * phase.steps
        if self.trial_steps + needed > most:
            spent = f"{self.trial_steps} of {most:.0f} steps of the budget are spent, a decision takes {needed}"
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
        has_changed = found.choice != active or (jump is not None and jump["kept"])
        self.unchanged = 0 if has_changed else step
        tokens = trials.steps * self.data.per_step * phase.block_size
        return found, {"steps": trials.steps, "seconds": round(trials.seconds, 4), "tokens": tokens}, jump

    def _nowcast(self, step: int, module: Any, trials: Trials, fork: Fork, name: str) -> dict[str, Any] | None:
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
            if is_settled(differences[-1], self.phase.orchestrator_repeats):
                break
        interval = compute_interval(differences)
        is_kept = interval.high < 0
        if is_kept:
            jump()
        self.snapshots.clear()
        ends = [interval.mean, interval.low, interval.high]
        return {"form": form, "differences": differences, "interval": ends, "kept": is_kept}

    def watch_step(self, step: int, parameters: list[Any]) -> None:
        """Look at the step before a decision: how much it changes the weights."""
        if self.is_due(step + 1):
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
            "unchanged": self.unchanged,
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
        self.unchanged = state.get("unchanged", 0)  # not in states of before trials became rarer
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
        self.journal.add(step, choice=str(values.pop("strategy", "")), reason=f"safety: {kind}", safety=kind, **values)


def gradient_noise(portfolio: Portfolio) -> float | None:
    """Return 1 - |mean g|^2 / mean |g|^2 over weights with both averages: 0 without noise, near 1 of noise alone."""
    mean = square = 0.0
    for group in portfolio.param_groups:
        states = [state for p in group["params"] if (state := portfolio.state.get(p))]
        if group["family"] != "adamw" or not states:
            continue
        means, squares, steps = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step"))
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
