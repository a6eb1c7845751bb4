"""AdaGC against algorithm 1 of its paper, written for one tensor at a time; clipping by value."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from caramba.optim import AdaGC, clip_values

SHAPES, WARMUP, LIMIT = ((4, 3), (5,), (2, 2)), 3, 1.5
LATE = 2  # this tensor's gradient is zero in the warm-up, as that of a low-rank update may be


def made() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES]


def clipping(parameters: list[nn.Parameter]) -> AdaGC:
    return AdaGC(parameters, beta=0.9, relative=1.05, warmup_steps=WARMUP, max_norm=LIMIT)


def gradient(tensor: int, step: int) -> Tensor | None:
    if tensor == 1 and step == 5:
        return None  # a block that does not train at this step
    torch.manual_seed(100 * step + tensor)
    spike = 50.0 if step in (4, 7) else 1.0
    return torch.randn(SHAPES[tensor], dtype=torch.float64) * (0.0 if tensor == LATE and step < WARMUP else spike)


def test_clipping_is_the_published_algorithm_and_goes_on_from_its_state() -> None:
    parameters = made()
    clip = clipping(parameters)
    gamma = [math.inf] * 3
    for step in range(9):
        grads = [gradient(tensor, step) for tensor in range(3)]
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = None if grad is None else grad.clone()
        total = math.sqrt(sum(float(grad.norm()) ** 2 for grad in grads if grad is not None))
        torch.testing.assert_close(clip([parameters]), torch.tensor(total, dtype=torch.float64))
        for tensor, grad in enumerate(grads):
            if grad is None:
                assert parameters[tensor].grad is None
                continue
            norm = float(grad.norm())
            if step < WARMUP:
                factor = min(1.0, LIMIT / (total + 1e-6))
                if norm > 0:
                    gamma[tensor] = min(gamma[tensor], factor * norm)
            else:
                factor = min(1.0, 1.05 * gamma[tensor] / norm)
                first = math.isinf(gamma[tensor])
                gamma[tensor] = factor * norm if first else 0.9 * gamma[tensor] + 0.1 * factor * norm
            torch.testing.assert_close(parameters[tensor].grad, grad * factor, rtol=1e-12, atol=0)
        if step == 6:
            saved, clip = clip.state_dict(), clipping(parameters)
            clip.load_state_dict(saved)
    torch.testing.assert_close(clip.gamma, torch.tensor(gamma, dtype=torch.float64), rtol=1e-12, atol=0)


def test_a_spike_of_one_tensor_leaves_the_others_alone_and_a_broken_gradient_no_trace() -> None:
    parameters = made()
    clip = clipping(parameters)
    for step in range(WARMUP + 1):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter) * 0.1
        if step == WARMUP:
            parameters[0].grad *= 1e4
        clip([parameters])
    assert torch.equal(parameters[1].grad, torch.ones_like(parameters[1]) * 0.1)
    torch.testing.assert_close(parameters[0].grad.norm().item(), 1.05 * 0.1 * math.sqrt(12))
    before = clip.gamma.clone()
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter) * 0.1
    parameters[2].grad[0, 0] = torch.nan
    assert clip([parameters]).isnan()
    assert torch.equal(clip.gamma, before)


def test_clipping_by_value_bounds_every_element_and_tells_the_norm_before() -> None:
    parameters = made()
    for place, parameter in enumerate(parameters):
        parameter.grad = torch.linspace(-2, 2, parameter.numel(), dtype=torch.float64).reshape(SHAPES[place])
    before = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    norm = clip_values([parameters[:1], parameters[1:]], 0.5)
    after = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    torch.testing.assert_close(norm, before.norm())
    assert torch.equal(after, before.clamp(-0.5, 0.5))
    assert clip_values([[nn.Parameter(torch.zeros(2))]], 0.5) == 0.0
