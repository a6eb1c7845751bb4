"""Lion follows its formula over the phase's groups, goes on from a saved state bit for bit, and is asked for by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from caramba.config.train import PhaseConfig
from caramba.errors import ConfigError
from caramba.optim import Lion, build_optimizer

PHASE = {"phase": "pretrain", "steps": 9, "optimizer": "lion", "lr": 0.01, "weight_decay": 0.5}


def made() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    shapes = {"up.weight": (3, 4), "norm.weight": (4,), "embedder.weight": (5, 2), "idle.weight": (2, 2)}
    return {name: nn.Parameter(torch.randn(shape, dtype=torch.float64)) for name, shape in shapes.items()}


def test_groups_follow_the_formula_and_a_state_goes_on_bit_equal() -> None:
    phase = PhaseConfig(**PHASE)
    assert phase.betas == (0.9, 0.99), "the published ones"
    ours = made()
    optimizer = build_optimizer(ours.items(), phase)
    assert isinstance(optimizer, Lion)
    want = {name: value.detach().clone() for name, value in ours.items()}
    momenta = {name: torch.zeros_like(value) for name, value in want.items()}
    for step in range(6):
        for at, (name, value) in enumerate(ours.items()):
            if name == "idle.weight":
                continue
            torch.manual_seed(10 * step + at)
            grad = torch.randn(value.shape[::-1], dtype=torch.float64).t() if value.ndim > 1 else value.detach().sin()
            value.grad = grad
            decay = 0.5 if name == "up.weight" else 0.0
            want[name] = want[name] * (1 - 0.01 * decay) - 0.01 * torch.sign(0.9 * momenta[name] + 0.1 * grad)
            momenta[name] = 0.99 * momenta[name] + 0.01 * grad
        optimizer.step()
        if step == 2:  # as after a kill: new objects, from what was saved
            saved, weights = optimizer.state_dict(), {name: value.detach() for name, value in ours.items()}
            ours = made()
            for name, value in ours.items():
                value.data.copy_(weights[name])
            optimizer = build_optimizer(ours.items(), phase)
            optimizer.load_state_dict(saved)
    for name, value in ours.items():
        torch.testing.assert_close(value.detach(), want[name], rtol=1e-14, atol=1e-15)
    assert ours["idle.weight"] not in optimizer.state
    assert {len(state) for state in optimizer.state.values()} == {1}, "one state for each weight"


def test_what_lion_cannot_use_is_refused() -> None:
    assert PhaseConfig(**PHASE, betas=(0.95, 0.98)).betas == (0.95, 0.98)
    with pytest.raises(ValueError, match=r"lr=auto uses AdamW's .* got optimizer=lion; give lr, 3 to 10 times"):
        PhaseConfig(**{**PHASE, "lr": "auto"})
    with pytest.raises(ConfigError, match=r"lion: betas=\[0.9, 1.0\], expected two numbers from 0 to below 1"):
        Lion([nn.Parameter(torch.zeros(2))], lr=0.1, betas=(0.9, 1.0))
