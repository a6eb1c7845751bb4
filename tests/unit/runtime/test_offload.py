"""Activations that wait on the host give the same gradients, and weights do not go there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from caramba.runtime import activations_on_host

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_the_same_and_activations_are_copies_on_the_host(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(device)
    x = torch.randn(5, 8, device=device)
    want = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    made, empty = [], torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, **kind: made.append(empty(x, **kind)) or made[-1])
    with activations_on_host(model.parameters(), least_bytes=5 * 8 * 4):
        loss = model(x).square().sum()
    monkeypatch.undo()
    found = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    # The inputs of both layers and of the activation; the output, of 80 bytes, and the weights stay.
    assert sorted(tuple(tensor.shape) for tensor in made) == [(5, 8), (5, 16), (5, 16)]
    assert all(tensor.device.type == "cpu" for tensor in made)
