"""Hand-over of an optimiser's state: the averages that one kind keeps of a weight, as another kind would have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
    lacking = [
        (one, grad) for one, grad in pairs if kind not in WITH_SECOND_MOMENT or "momentum_buffer" in one
    ]
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
