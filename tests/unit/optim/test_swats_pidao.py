"""SWATS and PIDAO follow their papers' updates written in numpy, and are asked for by name with keys of their own."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from caramba.config.train import PhaseConfig
from caramba.errors import ConfigError
from caramba.optim import build_optimizer
from caramba.optim.pidao import PIDAO
from caramba.optim.swats import SWATS

PHASE: dict[str, Any] = {"phase": "pretrain", "steps": 9, "lr": 0.01}
SHAPES = {"up.weight": (3, 4), "norm.weight": (4,)}
CURVATURE = np.linspace(0.5, 2.0, 16)


def made() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        for name, shape in SHAPES.items()
    }


def flat(named: dict[str, nn.Parameter]) -> np.ndarray:
    return np.concatenate([value.detach().numpy().ravel() for value in named.values()])


def give_gradient(named: dict[str, nn.Parameter], gradient: np.ndarray) -> None:
    start = 0
    for value in named.values():
        part = gradient[start : start + value.numel()]
        value.grad, start = torch.from_numpy(part.reshape(value.shape).copy()), start + value.numel()


def gradient_at(w: np.ndarray, step: int, noise: float) -> np.ndarray:
    return CURVATURE * w + noise * np.random.default_rng(step).standard_normal(w.size)


def swats(
    w: np.ndarray, steps: int, lr: float, betas: tuple[float, float], tolerance: float, noise: float
) -> tuple[np.ndarray, int | None]:
    """Algorithm 1 of the paper."""
    beta1, beta2 = betas
    m, a, v, average, rate, at = np.zeros(16), np.zeros(16), np.zeros(16), 0.0, None, None
    for k in range(1, steps + 1):
        g = gradient_at(w, k, noise)
        if rate is not None:
            v = beta1 * v + g
            w = w - (1 - beta1) * rate * v
            continue
        m, a = beta1 * m + (1 - beta1) * g, beta2 * a + (1 - beta2) * g * g
        p = -lr * math.sqrt(1 - beta2**k) / (1 - beta1**k) * m / (np.sqrt(a) + 1e-8)
        w = w + p
        if p @ g != 0:
            gamma = p @ p / -(p @ g)
            average = beta2 * average + (1 - beta2) * gamma
            if k > 1 and average / (1 - beta2**k) > 0 and abs(average / (1 - beta2**k) - gamma) < tolerance:
                rate, at = average / (1 - beta2**k), k
    return w, at


@pytest.mark.parametrize(("tolerance", "switches"), [(1e-12, False), (1e-3, True)])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_swats_is_the_papers_algorithm(tolerance: float, switches: bool, noise: float) -> None:
    named = made()
    optimizer = SWATS(list(named.values()), lr=0.01, betas=(0.9, 0.99), tolerance=tolerance)
    want, at = swats(flat(named), 100, 0.01, (0.9, 0.99), tolerance, noise)
    assert (at is not None and at < 90) is switches
    for step in range(1, 101):
        give_gradient(named, gradient_at(flat(named), step, noise))
        optimizer.step()
    np.testing.assert_allclose(flat(named), want, rtol=1e-10, atol=1e-12)
    assert (optimizer.sgd_rate is not None) is switches


def test_after_the_switch_the_schedule_scales_the_rate_and_a_saved_state_goes_on_bit_equal() -> None:
    named = made()
    optimizer = SWATS(list(named.values()), lr=0.01, betas=(0.9, 0.99), tolerance=1e-3)
    for step in range(1, 60):
        give_gradient(named, gradient_at(flat(named), step, 0.0))
        optimizer.step()
    assert optimizer.sgd_rate is not None
    twins = made()
    for name, value in twins.items():
        value.data.copy_(named[name])
    again = SWATS(list(twins.values()), lr=0.5, betas=(0.9, 0.99), tolerance=1e-3)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = flat(named)
    buffers = [optimizer.state[value]["momentum_buffer"].clone() for value in named.values()]
    for one, weights in ((optimizer, named), (again, twins)):
        one.param_groups[0]["lr"] = 0.002  # a fifth of the lr of the switch
        give_gradient(weights, gradient_at(before, 60, 0.0))
        one.step()
    moved = flat(named) - before
    velocity = 0.9 * np.concatenate([b.numpy().ravel() for b in buffers]) + gradient_at(before, 60, 0.0)
    np.testing.assert_allclose(moved, -0.1 * optimizer.sgd_rate * 0.2 * velocity, rtol=1e-8)
    assert flat(named).tolist() == flat(twins).tolist()


@pytest.mark.parametrize("adaptive", [False, True])
def test_pidao_is_the_papers_update(adaptive: bool) -> None:
    named = made()
    kp, ki, kd, damping, lr, decay = 5.0, 0.4, 0.8, 3.0, 0.05, 0.1
    gains: dict[str, Any] = {"kp": kp, "ki": ki, "kd": kd, "damping": damping}
    optimizer = PIDAO(list(named.values()), lr=lr, adaptive=adaptive, beta2=0.99, weight_decay=decay, **gains)
    w, z, y, v = flat(named), np.zeros(16), np.zeros(16), np.zeros(16)
    for k in range(1, 101):
        g = gradient_at(w, k, 0.3)
        give_gradient(named, gradient_at(flat(named), k, 0.3))
        optimizer.step()
        z = z + lr * g
        size = 1.0
        if adaptive:
            v = 0.99 * v + 0.01 * g * g
            size = np.sqrt(v / (1 - 0.99**k)) + 1e-8
        y = (y - lr * (kp - damping * kd) * g / size - lr * ki * z / size) / (1 + damping * lr)
        w = w * (1 - lr * decay) + lr * y - lr * kd * g / size
        np.testing.assert_allclose(flat(named), w, rtol=1e-10, atol=1e-12)


def test_pidao_reaches_the_minimum_of_a_quadratic() -> None:
    gains: dict[str, Any]
    for gains in (
        {"kp": 25.0, "ki": 1.0, "kd": 0.5, "damping": 25.0},
        {"kp": 4.0, "ki": 2.0, "kd": 1.0, "damping": 2.0},
    ):
        named = made()
        optimizer = PIDAO(list(named.values()), lr=0.02, **gains)
        for _ in range(6000):
            give_gradient(named, CURVATURE * (flat(named) - 1.0))
            optimizer.step()
        np.testing.assert_allclose(flat(named), 1.0, atol=5e-3)


@pytest.mark.parametrize(
    ("name", "kind", "keys"),
    [
        ("swats", SWATS, {"swats": {"tolerance": 1e-4}, "betas": (0.9, 0.99)}),
        ("pidao", PIDAO, {"pidao": {"kp": 2.0, "ki": 0.1, "kd": 0.2, "damping": 4.0}}),
        ("pidao_adaptive", PIDAO, {"betas": (0.9, 0.999)}),
    ],
)
def test_both_are_built_by_name_and_go_on_bit_equal_from_a_saved_state(
    name: str, kind: type, keys: dict[str, Any]
) -> None:
    phase = PhaseConfig(**PHASE, optimizer=name, weight_decay=0.5, **keys)
    ours, want = made(), made()
    optimizer, whole = build_optimizer(ours.items(), phase), build_optimizer(want.items(), phase)
    assert isinstance(optimizer, kind)
    for step in range(8):
        if step == 4:
            saved, weights = optimizer.state_dict(), {key: value.detach() for key, value in ours.items()}
            ours = made()
            for key, value in ours.items():
                value.data.copy_(weights[key])
            optimizer = build_optimizer(ours.items(), phase)
            optimizer.load_state_dict(saved)
        for one, named in ((optimizer, ours), (whole, want)):
            give_gradient(named, gradient_at(flat(named), step, 0.3))
            one.step()
    assert flat(ours).tolist() == flat(want).tolist()


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"optimizer": "pidao", "lr": "auto"}, "lr=auto uses AdamW's .* got optimizer=pidao; give lr, whose"),
        ({"swats": {"tolerance": 1e-4}}, "swats belongs to optimizer=swats, got optimizer=adamw; remove it"),
        ({"pidao": {"kp": 1}}, "pidao belongs to optimizer=pidao or pidao_adaptive, got optimizer=adamw"),
        ({"optimizer": "pidao", "pidao": {"kp": 1, "ki": 9, "damping": 3}}, "ki=9 reaches damping . kp = 3"),
        ({"optimizer": "swats", "swats": {"tolerance": 0}}, "greater than 0"),
        (
            {"optimizer": "swats", "dtype": "bfloat16", "use_amp": False, "stochastic_rounding": True},
            "swats decides for all weights together",
        ),
    ],
)
def test_what_they_cannot_use_is_refused(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PhaseConfig(**{**PHASE, **keys})


def test_their_arguments_are_checked() -> None:
    weights = [nn.Parameter(torch.zeros(2))]
    with pytest.raises(ConfigError, match=r"swats: tolerance=0, expected a number above 0"):
        SWATS(weights, lr=0.1, tolerance=0)
    with pytest.raises(ConfigError, match=r"swats: betas=\[0.9, 1.0\]"):
        SWATS(weights, lr=0.1, betas=(0.9, 1.0))
    with pytest.raises(ConfigError, match=r"pidao: .* lower ki"):
        PIDAO(weights, lr=0.1, kp=1, ki=5, kd=0, damping=2)
