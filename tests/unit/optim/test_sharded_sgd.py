"""SGD of weights of which each rank holds a part: torch's fused step has no rule for them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from caramba.config.train import PhaseConfig
from caramba.optim import build_optimizer
from tests.preloaded import start_ranks
from tests.ranks import leave_together, meet

RANKS, STEPS = 2, 3


def steps(model: nn.Module) -> None:
    phase = PhaseConfig(phase="pretrain", steps=STEPS, optimizer="sgd", lr=0.1, weight_decay=0.01)
    optimizer = build_optimizer(model.named_parameters(), phase)
    for step in range(STEPS):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))


def rank_main(rank: int, folder: str) -> None:
    meet(rank, folder, RANKS, timedelta(minutes=5))
    whole, parts = model(), model()
    mesh = init_device_mesh("cpu", (RANKS,))
    fully_shard(parts, mesh=mesh)
    steps(whole)
    steps(parts)
    for one, part in zip(whole.parameters(), parts.parameters(), strict=True):
        assert isinstance(part, DTensor)
        torch.testing.assert_close(part.full_tensor(), one)
    leave_together()


def test_sharded_weights_step_as_whole_ones(tmp_path: Path) -> None:
    start_ranks(rank_main, (str(tmp_path),), RANKS)
