"""Clipping in groups gives torch's own numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from caramba.optim import clip_gradients


def groups_of(*sizes: tuple[int, ...]) -> list[list[nn.Parameter]]:
    torch.manual_seed(0)
    groups = [[nn.Parameter(torch.zeros(n, n)) for n in group] for group in sizes]
    for place, parameter in enumerate(p for group in groups for p in group):
        parameter.grad = torch.randn_like(parameter) * (place + 1)
    return groups


@pytest.mark.parametrize("sizes", [((3, 4), (5, 6)), ((3, 4, 5), (7,)), ((6, 2, 3),)], ids=str)
@pytest.mark.parametrize("limit", [1.0, 20.0])
def test_every_group_is_scaled_as_torch_scales_it_alone(sizes: tuple[tuple[int, ...], ...], limit: float) -> None:
    groups = groups_of(*sizes)
    idle = [nn.Parameter(torch.zeros(2))]  # a block that does not train at this step
    theirs = copy.deepcopy(groups)
    for mine, other in zip(groups, theirs, strict=True):
        for a, b in zip(mine, other, strict=True):
            b.grad = None if a.grad is None else a.grad.clone()
    norms = torch.stack([nn.utils.clip_grad_norm_(group, limit) for group in theirs])
    found = clip_gradients([groups[0], idle, *groups[1:]], limit)
    assert torch.equal(found, norms[0] if len(norms) == 1 else norms.norm())
    for mine, other in zip(groups, theirs, strict=True):
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(mine, other, strict=True))
    assert idle[0].grad is None


def test_without_a_limit_gradients_stay_and_their_norm_is_told() -> None:
    groups = groups_of((3, 4), (5,))
    before = [p.grad.clone() for group in groups for p in group if p.grad is not None]
    norm = clip_gradients(groups, None)
    torch.testing.assert_close(norm, torch.cat([grad.flatten() for grad in before]).norm())
    after = [p.grad for group in groups for p in group]
    assert all(a is not None and torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert clip_gradients([[nn.Parameter(torch.zeros(2))]], 1.0) == 0.0
