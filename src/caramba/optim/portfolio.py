"""A portfolio of optimiser strategies as one optimiser: one steps at a time, states are handed over, and it clips."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from caramba.config.optimizer import MATCHED, SECOND_MOMENTS, AdaGCConfig, StrategyConfig
from caramba.config.train import PhaseConfig
from caramba.errors import ConfigError
from caramba.optim.adagc import AdaGC
from caramba.optim.clip import clip_gradients, clip_values, clipping_step
from caramba.optim.groups import Named, call_closure, copies_of
from caramba.optim.muon import MuonAdamW
from caramba.runtime.device import wide_dtype

ADAM, LION, MUON, SGD = "adamw", "lion", "muon", "sgd"
SWATS, PIDAO, PIDAO_ADAPTIVE = "swats", "pidao", "pidao_adaptive"
WITH_SECOND_MOMENT = (ADAM, SWATS, PIDAO_ADAPTIVE)


@dataclass
class Averages:
    """Averages of a weight's gradient g and of g^2, None where there are none, and the steps of the latter."""

    mean: Tensor | None
    """About the average of g, without the shortfall of an average that began at 0."""
    square: Tensor | None
    steps: float


def bias(beta: float, steps: float) -> float:
    """Return 1 - beta^steps, by which an average that began at 0 falls short."""
    return 1.0 - beta**steps


def read_averages(kind: str, state: dict[str, Any], group: dict[str, Any]) -> Averages:
    """Return the averages in a weight's state of a kind of optimiser; what it lacks is `shadow_`'s.

    Lion's and Muon's buffers are averages of g. SGD's is their sum, 1 / (1 - momentum) times as large.
    """
    steps = float(state["step"]) if "step" in state else 0.0
    square = state.get("exp_avg_sq")
    if kind == LION:
        return Averages(state.get("momentum"), square, steps)
    if kind == MUON:
        return Averages(state.get("momentum_buffer"), square, steps)
    if kind == SGD or (kind == SWATS and "momentum_buffer" in state):
        momentum = group["momentum"] if kind == SGD else group["betas"][0]
        buffer = state.get("momentum_buffer")
        return Averages(None if buffer is None else buffer * (1.0 - momentum), square, steps)
    if kind == SWATS:
        steps = float(group["k"])
    mean = state.get("exp_avg")
    if mean is not None and steps:
        mean = mean / bias(_beta1(group), steps)
    return Averages(mean, square, steps)


def write_averages(kind: str, found: Averages, group: dict[str, Any], weight: Tensor) -> dict[str, Any]:
    """Return the state with which a kind of optimiser resumes from averages; empty where it begins afresh."""
    mean, steps = found.mean, found.steps
    if mean is None:
        return {}
    kept: dict[str, Any] = {}
    if found.square is not None:
        kept = {"exp_avg_sq": found.square, "step": torch.tensor(steps, device=weight.device)}
    if kind == LION:
        return {"momentum": mean.clone(), **kept}
    if kind == MUON:
        return {"momentum_buffer": mean.clone(), **kept}
    if kind == SGD:
        return {"momentum_buffer": mean / (1.0 - group["momentum"]), **kept}
    if kind in (PIDAO, PIDAO_ADAPTIVE):
        divided = mean
        if kind == PIDAO_ADAPTIVE:
            if found.square is None:
                return {}
            divided = mean / ((found.square / bias(group["beta2"], steps)).sqrt() + group["eps"])
        # The velocity that a constant gradient of this size settles at: x' = -kp g / a, y = x' + kd g.
        velocity = divided * (group["kd"] - group["kp"] / group["damping"])
        if kind == PIDAO:
            kept["exp_avg"] = mean * bias(BETA1, max(steps, 1.0))
        return {"integral": torch.zeros_like(mean), "velocity": velocity, **kept}
    if found.square is None:
        return {}
    state = {"exp_avg": mean * bias(_beta1(group), steps), "exp_avg_sq": found.square}
    if kind == SWATS:
        group["k"] = int(steps)
        return state
    return {"step": kept["step"], **state}


def same_state(kind: str, other: str, group: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether a state passes over as it is, to the bit: the same kind with the same first moment."""
    return kind == other and kind in (ADAM, LION, MUON, SGD) and _beta1(group) == _beta1(after)


BETA1 = 0.9
"""Decay of the average of g that is kept next to an optimiser without one."""


def shadow_(kind: str, states: Sequence[dict[str, Any]], grads: Sequence[Tensor], beta2: float) -> None:
    """Keep next to an optimiser the averages that it lacks, weight by weight, for another to take over."""
    pairs = list(zip(states, grads, strict=True))
    lacking = [(one, grad) for one, grad in pairs if kind not in WITH_SECOND_MOMENT or "momentum_buffer" in one]
    for state, grad in lacking:
        if "exp_avg_sq" not in state:
            state["exp_avg_sq"] = torch.zeros_like(grad)
            state["step"] = torch.zeros((), device=grad.device)
    if lacking:
        squares, steps = ([one[key] for one, _ in lacking] for key in ("exp_avg_sq", "step"))
        own = [grad for _, grad in lacking]
        torch._foreach_mul_(squares, beta2)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_addcmul_(squares, own, own, value=1.0 - beta2)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_add_(steps, 1)  # pyright: ignore[reportPrivateImportUsage]
    if kind in (PIDAO, PIDAO_ADAPTIVE) and pairs:
        for state, grad in pairs:
            if "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(grad)
        means = [state["exp_avg"] for state in states]
        torch._foreach_lerp_(means, list(grads), 1.0 - BETA1)  # pyright: ignore[reportPrivateImportUsage]


def _beta1(group: dict[str, Any]) -> float:
    return group["betas"][0] if "betas" in group else group.get("momentum", BETA1)


DRY_RUNS = 3
"""Runs in which the rate of an update that is not proportional to it is found; one is enough for all others."""
Squares = dict[nn.Parameter, Tensor]


class Portfolio(torch.optim.Optimizer):
    """Steps by the active strategy of a phase; `switch` has another take over at the next step.

    The next optimiser resumes from the averages of the one before (`handover`). Its rate begins where its update is as
    large, group by group, as the update that the one before would make of the same gradients, which a dry run of both
    measures. It then goes to the strategy's own rate geometrically, in `ramp_steps`, at first the phase's. lr times
    weight decay stays the schedule's. A switch to the strategy in use, or to one with equal data, changes no bit.

    While the active optimiser lacks an average of g^2 that another strategy needs, it is kept next to it; `is_ready`
    tells when it has seen enough steps. All is in `param_groups` and `state`, and is saved and loaded as one optimiser.
    """

    def __init__(
        self,
        named: Iterable[Named],
        phase: PhaseConfig,
        build: Callable[[list[Named], PhaseConfig], torch.optim.Optimizer],
    ) -> None:
        self.named, self.phase, self._build = list(named), phase, build
        self.strategies: Mapping[str, StrategyConfig] = phase.orchestrator_strategies
        self.active, self.pending = phase.orchestrator_initial_strategy, ""
        self.inner = self._make(self.active)
        super().__init__(self.inner.param_groups, {})
        self._install(self.active, self.inner)
        self.ramp_steps = phase.orchestrator_ramp_steps  # of switches from now on
        self._keeps_squares = (
            any(one.optimizer in SECOND_MOMENTS for one in self.strategies.values())
            and len(self.strategies) > 1
            and phase.orchestrator_mode == "active"
        )

    @property
    def strategy(self) -> StrategyConfig:
        """The data of the active strategy."""
        return self.strategies[self.active]

    def switch(self, name: str) -> None:
        """Have strategy `name` take over at the next step.

        Raises:
            ConfigError: no strategy of the portfolio, or one that needs more averages of g^2 than there are.
        """
        if name not in self.strategies:
            raise ConfigError(f"portfolio: strategy {name!r}, expected one of {', '.join(self.strategies)}")
        if not self.is_ready(name):
            raise ConfigError(
                f"portfolio: {name} needs averages of g^2 over {self._least_steps} steps, {self.active} has "
                f"{self._squares_seen():.0f}; switch later"
            )
        self.pending = name if name != self.active else ""
        self._note("next_strategy", self.pending)

    def is_ready(self, name: str) -> bool:
        """Whether a strategy could take over now: one with second moments needs 1 / (1 - beta2) steps of them, unless
        the active one steps by its own."""
        has_own = self.strategy.optimizer in (ADAM, PIDAO_ADAPTIVE)
        if self.strategies[name].optimizer not in SECOND_MOMENTS or has_own or name == self.active:
            return True
        return self._squares_seen() >= self._least_steps

    @property
    def _least_steps(self) -> int:
        return math.ceil(1.0 / (1.0 - self.phase.betas[1]) - 1e-9)

    def _squares_seen(self) -> float:
        steps = [
            read_averages(group["family"], self.state[p], group).steps
            for group in self.param_groups
            for p in group["params"]
            if self.state.get(p)
        ]
        return min(steps, default=0.0)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; return what `closure`, run first, returns."""
        loss = call_closure(closure)
        self.take_step()
        return loss

    @torch.no_grad()
    def take_step(self) -> None:
        """Step without the hooks of `step`, which count steps of the run: those of a trial are none."""
        if self.pending and any(p.grad is not None for _, p in self.named):
            # Which measures updates of gradients: a step without any leaves it to the next.
            self._hand_over(self.pending)
        self._step_inner([self._factor(group) for group in self.param_groups])
        for group in self.param_groups:
            group["since"] += 1
        if self._keeps_squares:
            for group in self.param_groups:
                held = [p for p in group["params"] if p.grad is not None]
                states = [self.state[p] for p in held]
                shadow_(group["family"], states, [p.grad for p in held], self.phase.betas[1])

    def _factor(self, group: dict[str, Any]) -> float:
        """Return the multiple of lr that a group's rate is now."""
        first, own, ramp = group["first_factor"], group["own_factor"], group["ramp"]
        if own is None or first == own:
            return first
        share = min(1.0, group["since"] / ramp) if ramp else 1.0
        return own if share == 1.0 else first * (own / first) ** share

    def _step_inner(self, factors: list[float], *, decays: bool = True) -> None:
        settings = [(group["lr"], group.get("weight_decay", 0.0)) for group in self.param_groups]
        for group, factor, (lr, decay) in zip(self.param_groups, factors, settings, strict=True):
            group["lr"] = lr * factor
            if group["family"] == "sgd":  # whose own weight decay is added to the gradient
                group["weight_decay"] = 0.0
                held = [p for p in group["params"] if p.grad is not None]
                if decays and group["decoupled_decay"] and held:
                    kept = 1.0 - lr * group["decoupled_decay"]
                    torch._foreach_mul_(held, kept)  # pyright: ignore[reportPrivateImportUsage]
            else:
                group["weight_decay"] = decay / factor if decays else 0.0
        self.inner.step()
        for group, (lr, decay) in zip(self.param_groups, settings, strict=True):
            group["lr"], group["weight_decay"] = lr, decay

    def _make(self, name: str) -> torch.optim.Optimizer:
        one = self.strategies[name]
        own: dict[str, Any] = {
            "optimizer": one.optimizer,
            "weight_decay": self.phase.weight_decay * one.decay,
            "momentum": one.momentum,
            "swats": one.swats,
            "pidao": one.pidao,
        }
        if one.betas is not None:
            own["betas"] = one.betas
        inner = self._build(self.named, self.phase.model_copy(update=own))
        for group in inner.param_groups:
            of_muon = one.optimizer == MUON and "ns_steps" not in group
            group["family"] = ADAM if of_muon else one.optimizer
            group["decoupled_decay"] = group.get("weight_decay", 0.0) if group["family"] == "sgd" else 0.0
            factor = None if one.rate == MATCHED else float(one.rate)
            group.update(
                strategy=name,
                next_strategy="",
                first_factor=factor or 1.0,
                own_factor=factor,
                ramp=0,
                since=0,
            )
        return inner

    def _install(self, name: str, inner: torch.optim.Optimizer) -> None:
        self.active, self.inner = name, inner
        self.param_groups = inner.param_groups
        self._share()

    def _share(self) -> None:
        self.inner.param_groups, self.inner.state = self.param_groups, self.state
        if isinstance(self.inner, MuonAdamW):
            self.inner.share()

    def _note(self, key: str, value: Any) -> None:
        for group in self.param_groups:
            group[key] = value

    def _hand_over(self, name: str) -> None:
        self.pending = ""
        self._note("next_strategy", "")
        if self.strategies[name] == self.strategy:
            self.active = name
            self._note("strategy", name)
            return
        self._clip_at_once()
        lr = self.param_groups[0]["lr"]
        before = {p: group for group in self.param_groups for p in group["params"]}
        kept = self._copy_state()
        old = self._dry_run([self._factor(group) for group in self.param_groups], kept)
        inner = self._make(name)
        after = {p: group for group in inner.param_groups for p in group["params"]}
        for p, state in list(self.state.items()):
            if not state:
                continue
            kind, other = before[p]["family"], after[p]["family"]
            if not same_state(kind, other, before[p], after[p]):
                found = read_averages(kind, state, before[p])
                self.state[p] = write_averages(other, found, after[p], p)
        self._install(name, inner)
        for group in self.param_groups:
            group["lr"] = lr
        self._match(old)

    def _clip_at_once(self) -> None:
        """Scale the gradients that the next step was to scale: a dry run would, and no step after it."""
        clip = getattr(self.inner, "clip", None)
        if clip is not None:
            held = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            torch._foreach_mul_(held, clip)  # pyright: ignore[reportPrivateImportUsage]
            self.inner.clip = None  # pyright: ignore[reportAttributeAccessIssue] of our AdamW

    def _match(self, old: Squares) -> None:
        """Set each group's factor to where its update is as large as the one before."""
        if self.param_groups[0]["lr"] == 0:
            return
        kept = self._copy_state()
        factors = [1.0] * len(self.param_groups)
        for _ in range(DRY_RUNS):
            new = self._dry_run(factors, kept)
            for at, group in enumerate(self.param_groups):
                sums = [
                    torch.stack([squares[p] for p in group["params"] if p in squares]).sum()
                    for squares in (old, new)
                    if any(p in squares for p in group["params"])
                ]
                if len(sums) == 2 and float(sums[1]) > 0 and float(sums[0]) > 0:
                    factors[at] *= math.sqrt(float(sums[0]) / float(sums[1]))
            if not any(group["family"].startswith("pidao") for group in self.param_groups):
                break
        for group, factor in zip(self.param_groups, factors, strict=True):
            group["first_factor"], group["ramp"] = factor, self.ramp_steps

    def _dry_run(self, factors: list[float], kept: tuple[Any, ...]) -> Squares:
        """Return the squares of each weight's update, [] each; weights and states are as before."""
        stepped = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        weights = copies_of(stepped)
        self._step_inner(factors, decays=False)
        found = {
            p: (p.detach().to(wide_dtype(p.device)) - weight.to(wide_dtype(p.device))).square().sum()
            for p, weight in zip(stepped, weights, strict=True)
        }
        torch._foreach_copy_(stepped, weights)  # pyright: ignore[reportPrivateImportUsage]
        self._put_state(kept)
        return found

    def _copy_state(self) -> tuple[Any, ...]:
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return _copy_states(self.state), groups

    def _put_state(self, kept: tuple[Any, ...]) -> None:
        states, groups = kept
        self.state.clear()
        self.state.update(_copy_states(states))
        for group, values in zip(self.param_groups, groups, strict=True):
            group.update(values)

    def capture(self) -> dict[str, Any]:
        """Return a copy of everything but the weights, for `restore`."""
        return {"active": self.active, "pending": self.pending, "kept": self._copy_state()}

    def restore(self, captured: Mapping[str, Any]) -> None:
        """Go back to what `capture` returned, to the bit."""
        if captured["active"] != self.active:
            self._install(captured["active"], self._make(captured["active"]))
        self._put_state(captured["kept"])
        self.pending = captured["pending"]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        name = state_dict["param_groups"][0]["strategy"]
        if name not in self.strategies:
            raise ConfigError(
                f"portfolio: the saved state is of strategy {name!r}, expected one of {', '.join(self.strategies)}; "
                "put it back into orchestrator_strategies"
            )
        if name != self.active:
            self._install(name, self._make(name))
        super().load_state_dict(state_dict)
        self.pending = self.param_groups[0]["next_strategy"]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()


def _copy_states(states: Mapping[Any, Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
    held = [value for state in states.values() for value in state.values() if isinstance(value, Tensor)]
    copied = iter(copies_of(held))
    return {
        p: {key: next(copied) if isinstance(value, Tensor) else value for key, value in state.items()}
        for p, state in states.items()
    }


class StrategyClip(AdaGC):
    """AdaGC while the active strategy clips by it, else the phase's clipping; averages of norms are kept throughout."""

    def __init__(self, portfolio: Portfolio, parameters: Sequence[nn.Parameter]) -> None:
        phase = portfolio.phase
        settings = phase.adagc or AdaGCConfig()
        super().__init__(parameters, max_norm=phase.max_grad_norm, **settings.model_dump())
        self.portfolio, self.algorithm = portfolio, phase.gradient_clip_algorithm

    @torch.no_grad()
    def __call__(self, groups: Sequence[Sequence[nn.Parameter]]) -> Tensor:
        if self.portfolio.strategy.clip == "adagc":
            return super().__call__(groups)
        step, later = clipping_step(self.portfolio), None
        if self.algorithm == "value" and self.max_norm is not None:
            total = clip_values(groups, self.max_norm)
        else:
            total = clip_gradients(groups, self.max_norm, hand_over=None if step is None else step.take_clip)
            later = None if step is None else step.clip
        self._observe(total, later=later)
        return total


def build_strategy_clip(optimizer: Any, parameters: Sequence[nn.Parameter]) -> StrategyClip | None:
    """Return the clipping of a portfolio in which a strategy that may step asks for AdaGC; None where none does."""
    assert isinstance(optimizer, Portfolio)
    is_monitor = optimizer.phase.orchestrator_mode == "monitor"
    used = [optimizer.strategy] if is_monitor else optimizer.strategies.values()
    if not any(one.clip == "adagc" for one in used):
        return None
    return StrategyClip(optimizer, parameters)
