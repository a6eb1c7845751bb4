"""Two processes share the blocks of one student: each trains its own, and both end with all of them. Or they share the
data: both train all blocks, on rows of their own."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from caramba.distill import BlockSchedule, BlockShard, BlockwiseObjective, block_errors
from caramba.model import Model, build_model
from caramba.runtime import GradientAverage
from caramba.surgery import pair_attention
from tests.preloaded import start_ranks
from tests.ranks import leave_together, meet
from tests.unit.surgery.test_weight_svd import TOKENS, spec, student_spec

STEPS = 5


def trained(shard_of: tuple[int, int] | None) -> tuple[Model, list[str], int]:
    """Train a student's blocks and return it with the names it trained and the number of parameters with gradients."""
    teacher = build_model(spec(), seed=1).eval().requires_grad_(False)
    student = build_model(student_spec(4, 8, 8), seed=2)
    pairs = pair_attention(teacher, student)
    names = [name for name, _, _ in pairs]
    shard = BlockShard(names) if shard_of is None else BlockShard(names, *shard_of)
    schedule = BlockSchedule(shard.owned, steps=STEPS)
    objective = BlockwiseObjective(student, teacher, pairs, schedule=schedule, shard=shard)
    optimizer = torch.optim.SGD([value for _, value in objective.trainable()], lr=0.1)
    batch = (TOKENS[:, :-1], TOKENS[:, 1:])
    with_gradient = 0
    for _ in range(STEPS):
        losses = objective.step(batch, lambda loss: loss.backward())
        schedule.advance({name: float(losses[f"block/{name}"]) for name in schedule.active()})
        with_gradient = sum(value.grad is not None for value in student.parameters())
        optimizer.step()
        optimizer.zero_grad()
    objective.finish()
    return student, list(shard.owned), with_gradient


def trained_on_shares(shares: list[torch.Tensor]) -> Model:
    """Train all blocks on some rows each; with a process group these are one rank's, and gradients are averaged."""
    teacher = build_model(spec(), seed=1).eval().requires_grad_(False)
    student = build_model(student_spec(4, 8, 8), seed=2)
    pairs = pair_attention(teacher, student)
    objective = BlockwiseObjective(
        student, teacher, pairs, shard=BlockShard([name for name, _, _ in pairs], rank=0, world_size=1)
    )
    weights = [value for _, value in objective.trainable()]
    averaging = GradientAverage(objective.trainable(), group_bytes=2**20, missing="leave", in_backward=False)
    optimizer = torch.optim.SGD(weights, lr=0.1)
    for _ in range(STEPS):
        for rows in shares:
            objective.step((rows[:, :-1], rows[:, 1:]), lambda loss: (loss / len(shares)).backward())
        if dist.is_initialized():
            averaging.finish()
        optimizer.step()
        optimizer.zero_grad()
    return student


def rank_main(rank: int, folder: str) -> None:
    meet(rank, folder, 2, timedelta(minutes=5))
    student, owned, with_gradient = trained(None)
    teacher = build_model(spec(), seed=1).eval()
    errors = block_errors(teacher, pair_attention(teacher, student), TOKENS)
    torch.save(
        {
            "errors": errors,
            "state": student.state_dict(),
            "owned": owned,
            "grads": with_gradient,
            "averaged": trained_on_shares([TOKENS.chunk(2)[rank]]).state_dict(),
        },
        f"{folder}/{rank}.pt",
    )
    leave_together()


def test_two_ranks_end_with_the_weights_of_one(tmp_path: Path) -> None:
    start_ranks(rank_main, (str(tmp_path),), 2)
    torch.set_num_threads(1)
    alone, names, every = trained((0, 1))
    ends = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert [end["owned"] for end in ends] == [names[:1], names[1:]]
    assert [end["grads"] for end in ends] == [every // 2, every // 2], "no gradient of another's blocks"
    assert ends[0]["errors"] == ends[1]["errors"], "every rank measures all blocks"
    for key, value in trained_on_shares(list(TOKENS.chunk(2))).state_dict().items():
        torch.testing.assert_close(ends[1]["averaged"][key], value, rtol=1e-5, atol=1e-6)
    untouched = build_model(student_spec(4, 8, 8), seed=2).state_dict()
    for key, value in alone.state_dict().items():
        for end in ends:
            assert torch.equal(end["state"][key], value), key
        if "projection.q_sem" in key:
            assert not torch.equal(value, untouched[key])
