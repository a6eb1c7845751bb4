"""A portfolio steps as its active strategy would alone, hands states over, and goes on bit-equal from a saved state."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from caramba.config.optimizer import STRATEGIES
from caramba.config.train import PhaseConfig
from caramba.errors import ConfigError
from caramba.optim import AdamW, build_optimizer
from caramba.optim.portfolio import Portfolio, build_strategy_clip

SHAPES = {
    "layers.up.weight": (6, 8),
    "layers.norm.weight": (8,),
    "embedder.weight": (5, 4),
    "head.weight": (5, 8),
}
ALL = tuple(STRATEGIES)


def phase_of(*names: str, **keys: Any) -> PhaseConfig:
    values: dict[str, Any] = {
        "phase": "pretrain",
        "steps": 2000,
        "lr": 1e-2,
        "weight_decay": 0.1,
        "orchestrator_enabled": True,
        "orchestrator_strategies": list(names),
        "orchestrator_initial_strategy": names[0],
        "orchestrator_decision_interval": 100,
        "orchestrator_ramp_steps": 10,
    }
    return PhaseConfig(**{**values, **keys})


def made() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def give_gradients(named: dict[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for value in named.values():
        value.grad = 0.5 * value.detach() + 0.3 * torch.randn(value.shape, generator=generator)


def train(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter], steps: range) -> None:
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1.0 - step / 400)
        give_gradients(named, step)
        optimizer.step()


def values(named: dict[str, nn.Parameter]) -> list[list[float]]:
    return [value.detach().flatten().tolist() for value in named.values()]


def built(phase: PhaseConfig) -> tuple[Portfolio, dict[str, nn.Parameter]]:
    named = made()
    optimizer = build_optimizer(named.items(), phase)
    assert isinstance(optimizer, Portfolio)
    return optimizer, named


@pytest.mark.parametrize("names", [("conservative_adamw",), ("conservative_adamw", "muon", "sgd_escape")])
def test_adamw_in_a_portfolio_is_adamw_to_the_bit(names: tuple[str, ...]) -> None:
    optimizer, ours = built(phase_of(*names))
    want = made()
    plain = PhaseConfig(phase="pretrain", steps=2000, lr=1e-2, weight_decay=0.1)
    train(optimizer, ours, range(60))
    train(build_optimizer(want.items(), plain), want, range(60))
    assert values(ours) == values(want)


@pytest.mark.parametrize("name", [name for name in ALL if STRATEGIES[name].rate != "matched"])
def test_a_switch_to_itself_or_to_equal_data_changes_no_bit(name: str) -> None:
    twin = STRATEGIES[name].model_dump()
    phase = phase_of(name, orchestrator_strategies={name: None, "twin": twin})
    whole, want = built(phase)
    train(whole, want, range(80))
    optimizer, ours = built(phase)
    for step in range(80):
        if step in (30, 50):
            optimizer.switch(name if step == 50 else "twin")
        train(optimizer, ours, range(step, step + 1))
    assert optimizer.active == name
    assert values(ours) == values(want)


def update_of(optimizer: Portfolio, named: dict[str, nn.Parameter], step: int) -> float:
    before = {name: value.detach().clone() for name, value in named.items()}
    lr = 1e-2 * (1.0 - step / 400)
    train(optimizer, named, range(step, step + 1))
    squares = 0.0
    for name, value in named.items():
        decays = value.ndim > 1 and "embedder" not in name
        kept = before[name] * (1 - lr * 0.1) if decays else before[name]
        squares += float((value.detach() - kept).square().sum())
    return squares**0.5


@pytest.mark.parametrize(
    ("first", "second"),
    [(a, b) for a, b in itertools.permutations(ALL, 2) if STRATEGIES[a].rate != "matched"],
)
def test_every_hand_over_keeps_the_size_of_the_update_and_its_direction(first: str, second: str) -> None:
    """Against the same step without a switch, of a twin: the size is matched by group, so it is equal here."""
    phase = phase_of(first, second)
    optimizer, ours = built(phase)
    stays, theirs = built(phase)
    train(optimizer, ours, range(100))
    train(stays, theirs, range(100))
    start = values(ours)
    optimizer.switch(second)
    ratio = update_of(optimizer, ours, 100) / update_of(stays, theirs, 100)
    assert ratio == pytest.approx(1.0, abs=0.03)
    moved = [torch.tensor(after) - torch.tensor(before) for after, before in zip(values(ours), start, strict=True)]
    other = [torch.tensor(after) - torch.tensor(before) for after, before in zip(values(theirs), start, strict=True)]
    cosine = torch.cosine_similarity(torch.cat(moved), torch.cat(other), dim=0)
    assert float(cosine) > 0.3, "the averages have gone over: a fresh optimiser knows one noisy gradient"
    train(optimizer, ours, range(101, 150))
    assert optimizer.active == second
    assert all(torch.isfinite(value).all() for value in ours.values())


def test_sgd_takes_the_sum_of_gradients_and_gives_their_mean_back() -> None:
    optimizer, named = built(phase_of("conservative_adamw", "sgd_escape"))
    train(optimizer, named, range(200))
    p = named["layers.up.weight"]
    mean = optimizer.state[p]["exp_avg"].clone()
    optimizer.switch("sgd_escape")
    train(optimizer, named, range(200, 201))
    assert p.grad is not None
    torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], 0.9 * mean / (1 - 0.9) + p.grad)
    buffer, square = optimizer.state[p]["momentum_buffer"].clone(), optimizer.state[p]["exp_avg_sq"].clone()
    assert float(optimizer.state[p]["step"]) == 201, "kept beside SGD"
    optimizer.switch("conservative_adamw")
    train(optimizer, named, range(201, 202))
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], 0.9 * 0.1 * buffer + 0.1 * p.grad)
    torch.testing.assert_close(optimizer.state[p]["exp_avg_sq"], 0.95 * square + 0.05 * p.grad.square())


def test_adam_takes_over_only_once_squares_were_averaged_long_enough() -> None:
    optimizer, named = built(phase_of("lion", "conservative_adamw"))
    train(optimizer, named, range(19))
    assert not optimizer.is_ready("conservative_adamw")
    with pytest.raises(ConfigError, match=r"conservative_adamw needs averages of g\^2 over 20 steps, lion has 19"):
        optimizer.switch("conservative_adamw")
    train(optimizer, named, range(19, 20))
    optimizer.switch("conservative_adamw")
    want = {name: torch.zeros_like(value) for name, value in named.items()}
    twins = made()
    twin = build_optimizer(twins.items(), phase_of("lion", "conservative_adamw"))
    for step in range(20):
        train(twin, twins, range(step, step + 1))
        for name, value in twins.items():
            assert value.grad is not None
            want[name] = 0.95 * want[name] + 0.05 * value.grad.square()
    for name, value in named.items():
        torch.testing.assert_close(optimizer.state[value]["exp_avg_sq"], want[name])


def test_the_rate_goes_from_the_matched_one_to_the_strategys_own() -> None:
    optimizer, named = built(phase_of("conservative_adamw", "aggressive_adamw"))
    train(optimizer, named, range(50))
    optimizer.switch("aggressive_adamw")
    factors = []
    for step in range(50, 64):
        train(optimizer, named, range(step, step + 1))
        factors.append(optimizer._factor(optimizer.param_groups[0]))
    assert optimizer.param_groups[0]["first_factor"] == pytest.approx(1.0, rel=1e-6)
    assert factors[4] == pytest.approx(2**0.5, rel=1e-5)
    assert factors[9:] == [2.0] * 5
    assert optimizer.param_groups[0]["lr"] == 1e-2 * (1 - 63 / 400), "as the schedule has set it"


@pytest.mark.parametrize("second", [name for name in ALL if name != "conservative_adamw"])
def test_a_saved_state_goes_on_bit_equal_across_a_switch(second: str) -> None:
    phase = phase_of("conservative_adamw", second)
    whole, want = built(phase)
    optimizer, ours = built(phase)
    for step in range(60):
        if step == 28:
            whole.switch(second)
            optimizer.switch(second)
        if step in (25, 28, 29, 35):  # before the switch, between its decision and its step, and after it
            saved, weights = copy.deepcopy(optimizer.state_dict()), values(ours)
            optimizer, ours = built(phase)
            for value, old in zip(ours.values(), weights, strict=True):
                value.data.copy_(torch.tensor(old).view_as(value))
            optimizer.load_state_dict(saved)
        train(whole, want, range(step, step + 1))
        train(optimizer, ours, range(step, step + 1))
    assert optimizer.active == second
    assert values(ours) == values(want)


def test_what_was_captured_comes_back_to_the_bit() -> None:
    optimizer, named = built(phase_of("conservative_adamw", "muon", "swats"))
    train(optimizer, named, range(40))
    kept, weights = optimizer.capture(), values(named)
    train(optimizer, named, range(40, 60))
    want = values(named)
    for name in ("muon", "swats"):
        optimizer.restore(kept)
        for value, old in zip(named.values(), weights, strict=True):
            value.data.copy_(torch.tensor(old).view_as(value))
        optimizer.switch(name)
        train(optimizer, named, range(40, 50))
        assert values(named) != want
    optimizer.restore(kept)
    for value, old in zip(named.values(), weights, strict=True):
        value.data.copy_(torch.tensor(old).view_as(value))
    train(optimizer, named, range(40, 60))
    assert values(named) == want


def test_unknown_strategies_are_named() -> None:
    optimizer, named = built(phase_of("conservative_adamw", "lion"))
    with pytest.raises(ConfigError, match="strategy 'lyon', expected one of conservative_adamw, lion"):
        optimizer.switch("lyon")
    train(optimizer, named, range(30))
    optimizer.switch("lion")
    train(optimizer, named, range(30, 31))
    other, _ = built(phase_of("conservative_adamw", "muon"))
    with pytest.raises(ConfigError, match="saved state is of strategy 'lion', expected one of"):
        other.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    ("first", "mode", "averages"),
    [
        ("conservative_adamw", "active", True),
        ("conservative_adamw", "monitor", False),
        ("spike_resistant", "monitor", True),
    ],
)
def test_norms_are_averaged_for_a_strategy_that_may_step(first: str, mode: str, averages: bool) -> None:
    names = (first, "conservative_adamw" if first == "spike_resistant" else "spike_resistant")
    optimizer, named = built(phase_of(*names, orchestrator_mode=mode))
    assert (build_strategy_clip(optimizer, list(named.values())) is not None) == averages


def test_a_clip_that_the_next_step_was_to_apply_holds_for_the_strategy_that_takes_over() -> None:
    phase = phase_of("conservative_adamw", "sgd_escape")
    optimizer, ours = built(phase)
    scaled, theirs = built(phase)
    for one, named in ((optimizer, ours), (scaled, theirs)):
        train(one, named, range(30))
        one.switch("sgd_escape")
        give_gradients(named, 30)
    assert isinstance(optimizer.inner, AdamW)
    optimizer.inner.take_clip(torch.tensor(0.25))
    for value in theirs.values():
        assert value.grad is not None
        value.grad.mul_(0.25)
    for one in (optimizer, scaled):
        one.step()
    assert optimizer.active == "sgd_escape"
    assert values(ours) == values(theirs)


def test_a_step_without_gradients_leaves_the_hand_over_to_the_next() -> None:
    optimizer, named = built(phase_of("conservative_adamw", "muon"))
    train(optimizer, named, range(30))
    optimizer.switch("muon")
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    assert (optimizer.active, optimizer.pending) == ("conservative_adamw", "muon")
    train(optimizer, named, range(30, 31))
    assert optimizer.active == "muon"
    assert optimizer.param_groups[0]["first_factor"] != 1.0, "measured"
