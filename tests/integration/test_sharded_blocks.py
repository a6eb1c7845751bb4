"""Two processes share the blocks of one student: each trains its own, and both end with all of them."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from caramba.distill import BlockSchedule, BlockShard, BlockwiseObjective, block_errors
from caramba.model import Model, build_model
from caramba.upcycle import pair_attention
from tests.unit.upcycle.test_weight_svd import TOKENS, spec, student_spec

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


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    student, owned, with_gradient = trained(None)
    teacher = build_model(spec(), seed=1).eval()
    errors = block_errors(teacher, pair_attention(teacher, student), TOKENS)
    torch.save(
        {"errors": errors, "state": student.state_dict(), "owned": owned, "grads": with_gradient},
        f"{folder}/{rank}.pt",
    )
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_end_with_the_weights_of_one(tmp_path: Path) -> None:
    mp.spawn(rank_main, (str(tmp_path),), nprocs=2)
    torch.set_num_threads(1)
    alone, names, every = trained((0, 1))
    ends = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert [end["owned"] for end in ends] == [names[:1], names[1:]]
    assert [end["grads"] for end in ends] == [every // 2, every // 2], "no gradient of another's blocks"
    assert ends[0]["errors"] == ends[1]["errors"], "every rank measures all blocks"
    untouched = build_model(student_spec(4, 8, 8), seed=2).state_dict()
    for key, value in alone.state_dict().items():
        for end in ends:
            assert torch.equal(end["state"][key], value), key
        if "projection.q_sem" in key:
            assert not torch.equal(value, untouched[key])
