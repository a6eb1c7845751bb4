"""Blockwise objectives: what they train, on which inputs, in which order, and that the teacher runs no further."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from caramba.config.train import ConvergenceConfig
from caramba.distill import (
    BlockSchedule,
    BlockShard,
    BlockwiseObjective,
    attention_kl,
    block_errors,
    capture_attention_io,
    relative_l1,
)
from caramba.distill.block_loss import attention_log_probabilities
from caramba.errors import ConfigError
from caramba.layer import AttentionLayer, SwiGLULayer
from caramba.model import Model, Trace, build_model
from caramba.surgery import pair_attention
from tests.unit.surgery.test_weight_svd import TOKENS, loud, spec, student_spec

BATCH = (TOKENS[:, :-1], TOKENS[:, 1:])


def models(**extra: object) -> tuple[Model, Model, list[tuple[str, AttentionLayer, AttentionLayer]]]:
    teacher = build_model(spec(), seed=1).eval().requires_grad_(False)
    student = build_model(student_spec(4, 8, 8, **extra), seed=2)
    return teacher, student, pair_attention(teacher, student)


def backward(loss: Tensor) -> None:
    loss.backward()


def calls_of(model: nn.Module, kind: type[nn.Module], run: object) -> int:
    with Trace(model, lambda _name, module: isinstance(module, kind)) as trace:
        run()  # type: ignore[operator]
    return len(trace.records)


def test_blocks_get_the_teachers_input_and_output_and_nothing_runs_after_them() -> None:
    teacher, _student, pairs = models()
    layers = [(name, source) for name, source, _ in pairs]
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    capture_attention_io(teacher, layers, BATCH[0], lambda name, x, y: seen.__setitem__(name, (x, y)))
    assert list(seen) == [name for name, _ in layers]
    with Trace(teacher, lambda _n, module: isinstance(module, AttentionLayer), keep_inputs=True) as trace:
        teacher(BATCH[0])
    for record, (name, source) in zip(trace.records, layers, strict=True):
        assert torch.equal(seen[name][0], record.input)
        assert torch.equal(seen[name][1], record.output)
        assert not source._forward_hooks, "hooks must be removed"
    for stop, mlps in ((1, 0), (2, 1)):
        run = lambda stop=stop: capture_attention_io(teacher, layers[:stop], BATCH[0], lambda *_: None)  # noqa: E731
        assert calls_of(teacher, SwiGLULayer, run) == mlps, "the teacher stops at the last block's attention"


def test_blockwise_gradients_equal_those_of_each_block_alone() -> None:
    teacher, student, pairs = models()
    BlockwiseObjective(student, teacher, pairs).step(BATCH, backward)
    alone = copy.deepcopy(student)
    alone.zero_grad()
    inputs = {}
    layers = [(name, source) for name, source, _ in pairs]
    capture_attention_io(teacher, layers, BATCH[0], lambda name, x, y: inputs.__setitem__(name, (x, y)))
    for name, layer in alone.attention_layers():
        x, y = inputs[name]
        relative_l1(layer(x), y).backward()
    for (name, mine), (_, theirs) in zip(student.attention_layers(), alone.attention_layers(), strict=True):
        for (key, a), (_, b) in zip(mine.named_parameters(), theirs.named_parameters(), strict=True):
            assert a.grad is not None, f"{name}.{key}"
            torch.testing.assert_close(a.grad, b.grad)
    assert all(
        p.grad is None for name, p in student.named_parameters() if "projection" not in name and ".out" not in name
    )


@pytest.mark.parametrize("on_student", [False, True], ids=["blockwise", "drift"])
def test_training_lowers_every_blocks_error(on_student: bool) -> None:
    teacher, student, pairs = models()
    objective = BlockwiseObjective(student, teacher, pairs, on_student=on_student, attention_weight=0.1, n_queries=4)
    optimizer = torch.optim.AdamW([p for _, p in objective.trainable()], lr=1e-2)
    before = objective.evaluate(BATCH)
    for _ in range(60):
        objective.step(BATCH, backward)
        optimizer.step()
        optimizer.zero_grad()
    after = objective.evaluate(BATCH)
    blocks = [key for key in before if key.startswith("block/")]
    assert len(blocks) == 2
    assert all(after[key] < 0.7 * before[key] for key in blocks), (before, after)
    if not on_student:
        assert objective.evaluate(BATCH)["l1/" + pairs[0][0]] > 0
        assert max(block_errors(teacher, pairs, BATCH[0])) < 0.7


def test_drift_feeds_each_block_the_students_own_state() -> None:
    teacher, student, pairs = models()
    objective = BlockwiseObjective(student, teacher, pairs, on_student=True)
    losses = objective.step(BATCH, backward)
    with Trace(student, lambda _n, module: isinstance(module, AttentionLayer)) as ours:
        student(BATCH[0])
    with Trace(teacher, lambda _n, module: isinstance(module, AttentionLayer)) as theirs:
        teacher(BATCH[0])
    for (name, _, layer), mine, reference in zip(pairs, ours.outputs, theirs.outputs, strict=True):
        torch.testing.assert_close(losses[f"block/{name}"], relative_l1(mine, reference))
        assert all(parameter.grad is not None for parameter in layer.parameters())
        assert "forward" not in layer.__dict__, "the layer has its own forward again"
    other = [p for n, p in student.named_parameters() if not any(n.startswith(name) for name, _, _ in pairs)]
    assert all(p.grad is None for p in other), "no gradient crosses a block"


@pytest.mark.parametrize("extra", [{}, {"null_attn": True}, {"local_window": 5}])
def test_attention_kl_is_the_textbook_sum_over_the_queries(extra: dict[str, object]) -> None:
    torch.manual_seed(0)
    teacher, student = (
        loud(build_model(spec(), seed=1)).double(),
        loud(build_model(student_spec(4, 8, 8), seed=2)).double(),
    )
    theirs, ours = teacher.attention_layers()[0][1], student.attention_layers()[0][1]
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    every = torch.arange(9).expand(2, -1)
    p, q = (attention_log_probabilities(layer, x, every) for layer in (theirs, ours))
    torch.testing.assert_close(p.exp().sum(-1), torch.ones(2, 4, 9, dtype=torch.float64))
    terms = torch.where(p > float("-inf"), p.exp() * (p - q), 0.0)
    loss = attention_kl(theirs, ours, x, x, every)
    torch.testing.assert_close(loss, terms.sum(-1).mean())
    loss.backward()
    assert all(torch.isfinite(w.grad).all() for w in ours.projection.parameters() if w.grad is not None)
    assert abs(attention_kl(theirs, theirs, x, x, every[:, :3]).item()) < 1e-12
    special = build_model(student_spec(4, 8, 8, **extra), seed=3).double().attention_layers()[0][1]
    rows = attention_log_probabilities(special, x, every)
    torch.testing.assert_close(rows.exp().sum(-1), torch.ones(2, 4, 9, dtype=torch.float64))
    v = special.projection.keys_values(special.projection(x)[1])[1]
    if special.null_v is not None:
        v = torch.cat((special.null_v.view(1, 2, 1, -1).expand(2, -1, -1, -1), v), dim=2)
    o = rows.exp() @ v.repeat_interleave(2, dim=1)
    torch.testing.assert_close(special.out(o.transpose(1, 2).flatten(2)), special(x))
    special_loss = attention_kl(theirs, special, x, x, every)
    special_loss.backward()
    assert all(torch.isfinite(w.grad).all() for w in special.projection.parameters() if w.grad is not None)


def test_blocks_train_in_turn_and_the_teacher_stops_at_the_active_one() -> None:
    teacher, student, pairs = models()
    names = [name for name, _, _ in pairs]
    schedule = BlockSchedule(names, steps=5, is_sequential=True)
    objective = BlockwiseObjective(student, teacher, pairs, schedule=schedule)
    trained, spans, mlps = [], [], []
    for step in range(5):
        spans.append(objective.schedule_span(step, 5))
        found: dict[str, Tensor] = {}
        mlps.append(calls_of(teacher, SwiGLULayer, lambda found=found: found.update(objective.step(BATCH, backward))))
        trained.append([key for key in found if key.startswith("block/")])
        schedule.advance()
    assert trained == [[f"block/{names[0]}"]] * 3 + [[f"block/{names[1]}"]] * 2
    assert spans == [(0, 3), (1, 3), (2, 3), (0, 2), (1, 2)]
    assert mlps == [0, 0, 0, 1, 1]
    assert schedule.is_done
    with pytest.raises(ConfigError, match="trains 2 blocks in turn, got steps=1; use steps=2 or more"):
        BlockSchedule(names, steps=1, is_sequential=True)


def test_a_converged_block_is_frozen_and_skipped() -> None:
    teacher, student, pairs = models()
    first, second = (name for name, _, _ in pairs)
    schedule = BlockSchedule(
        [first, second], steps=100, convergence=ConvergenceConfig(target=0.5, patience=3, max_steps=20)
    )
    objective = BlockwiseObjective(student, teacher, pairs, schedule=schedule)
    below = []
    while first in schedule.active():
        schedule.advance({first: 0.0 if below else 0.9, second: 0.9})
        below.append(schedule.block_losses()[first] <= 0.5)
    assert below == [False, True, True, True], "patience: three steps in a row, of the smoothed loss"
    runs = calls_of(pairs[0][2], AttentionLayer, lambda: objective.step(BATCH, backward))
    assert runs == 0, "no student forward"
    assert all(parameter.grad is None for parameter in pairs[0][2].parameters())
    assert all(parameter.grad is not None for parameter in pairs[1][2].parameters())
    resumed = BlockSchedule(
        [first, second], steps=100, convergence=ConvergenceConfig(target=0.5, patience=3, max_steps=20)
    )
    resumed.load_state_dict(schedule.state_dict())
    while not schedule.is_done:
        schedule.advance({second: 0.9})
        resumed.advance({second: 0.9})
    assert resumed.summary() == schedule.summary()
    assert schedule.summary()[first]["ended"] == "converged"
    assert schedule.summary()[second] == {
        "steps": 20,
        "smoothed_loss": pytest.approx(0.9),
        "ended": "max_steps",
    }


def test_schedule_smooths_from_an_unbiased_start() -> None:
    schedule = BlockSchedule(["a"], steps=1000)
    schedule.advance({"a": 2.0})
    assert schedule.block_losses()["a"] == pytest.approx(2.0), "the first value is unbiased"
    for _ in range(500):
        schedule.advance({"a": 1.0})
    assert schedule.block_losses()["a"] == pytest.approx(1.0, abs=1e-3)
    assert not schedule.is_done, "without convergence a phase ends with its steps"


def test_each_rank_owns_consecutive_blocks() -> None:
    owned = [BlockShard("abcde", rank=rank, world_size=3).owned for rank in range(3)]
    assert owned == [("a", "b"), ("c", "d"), ("e",)]
    teacher, student, pairs = models()
    names = [name for name, _, _ in pairs]
    objective = BlockwiseObjective(student, teacher, pairs, shard=BlockShard(names, rank=1, world_size=2))
    losses = objective.step(BATCH, backward)
    assert f"block/{names[0]}" not in losses
    assert all(p.grad is None for p in pairs[0][2].parameters()), "another rank's block has no gradient here"
    assert [name.startswith(names[1]) for name, _ in objective.trainable()] == [True] * len(objective.trainable())
    with pytest.raises(ConfigError, match="3 ranks for 2 blocks"):
        BlockShard(names, rank=0, world_size=3)
