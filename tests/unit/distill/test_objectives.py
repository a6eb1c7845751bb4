"""Objectives: what they minimise, what they train, and that all blocks learn from one teacher pass."""

from __future__ import annotations

import copy

import pytest
import torch

from caramba.distill import (
    BlockSchedule,
    BlockwiseObjective,
    LanguageModelObjective,
    TeacherKLObjective,
    block_errors,
    relative_l1,
    tap_blocks,
    teacher_kl,
)
from caramba.model import build_model
from caramba.upcycle import pair_attention
from tests.unit.upcycle.test_weight_svd import TOKENS, spec, student_spec

BATCH = (TOKENS[:, :-1], TOKENS[:, 1:])


def models() -> tuple:
    teacher = build_model(spec(), seed=1).eval().requires_grad_(False)
    student = build_model(student_spec(4, 8, 8), seed=2)
    return teacher, student, pair_attention(teacher, student)


def test_blocks_get_the_teachers_input_and_output() -> None:
    teacher, _student, pairs = models()
    seen = {}
    tap_blocks(teacher, pairs, BATCH[0], lambda name, layer, x, y: seen.__setitem__(name, (layer, x, y)))
    assert [name for name, _, _ in pairs] == list(seen)
    for name, source, target in pairs:
        layer, x, y = seen[name]
        assert layer is target
        torch.testing.assert_close(source(x), y)
    assert not any(source._forward_hooks for _, source, _ in pairs), "hooks must be removed"


def test_blockwise_gradients_equal_those_of_each_block_alone() -> None:
    teacher, student, pairs = models()
    BlockwiseObjective(student, teacher, pairs).step(BATCH, lambda loss: loss.backward())
    alone = copy.deepcopy(student)
    alone.zero_grad()
    inputs = {}
    tap_blocks(teacher, pairs, BATCH[0], lambda name, layer, x, y: inputs.__setitem__(name, (x, y)))
    for name, layer in alone.attention_layers():
        x, y = inputs[name]
        relative_l1(layer(x), y).backward()
    for (name, mine), (_, theirs) in zip(student.attention_layers(), alone.attention_layers(), strict=True):
        for (key, a), (_, b) in zip(mine.named_parameters(), theirs.named_parameters(), strict=True):
            assert a.grad is not None, f"{name}.{key}"
            torch.testing.assert_close(a.grad, b.grad)
    assert all(
        p.grad is None
        for name, p in student.named_parameters()
        if "projection" not in name and ".out" not in name
    )


def test_blockwise_lowers_every_blocks_error() -> None:
    teacher, student, pairs = models()
    objective = BlockwiseObjective(student, teacher, pairs)
    optimizer = torch.optim.AdamW([p for _, p in objective.trainable()], lr=1e-2)
    before = block_errors(teacher, pairs, BATCH[0])
    for _ in range(60):
        objective.step(BATCH, lambda loss: loss.backward())
        optimizer.step()
        optimizer.zero_grad()
    after = block_errors(teacher, pairs, BATCH[0])
    assert all(b < 0.7 * a for a, b in zip(before, after, strict=True)), (before, after)


def test_teacher_kl_is_the_textbook_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = torch.randn(2, 3, 5, generator=generator), torch.randn(2, 3, 5, generator=generator)
    p, q = theirs.double().softmax(-1), ours.double().softmax(-1)
    expected = (p * (p.log() - q.log())).sum(-1).mean()
    torch.testing.assert_close(teacher_kl(ours, theirs).double(), expected, atol=1e-6, rtol=1e-5)
    assert teacher_kl(theirs, theirs).abs() < 1e-6


def test_kl_objective_leaves_the_teacher_alone() -> None:
    teacher, student, _ = models()
    before = {key: value.clone() for key, value in teacher.state_dict().items()}
    losses = TeacherKLObjective(student, teacher).step(BATCH, lambda loss: loss.backward())
    assert losses["loss"] > 0
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(torch.equal(value, before[key]) for key, value in teacher.state_dict().items())
    assert all(parameter.grad is not None for parameter in student.parameters())


def test_language_model_objective_agrees_with_its_evaluation() -> None:
    model = build_model(spec(), seed=1)
    objective = LanguageModelObjective(model)
    stepped = objective.step(BATCH, lambda loss: loss.backward())["loss"]
    torch.testing.assert_close(stepped, objective.evaluate(BATCH)["loss"])


def test_schedule_smooths_and_resumes() -> None:
    schedule = BlockSchedule()
    schedule.record({"a": 2.0})
    assert schedule.smoothed()["a"] == pytest.approx(2.0), "the first value is unbiased"
    for _ in range(500):
        schedule.record({"a": 1.0})
    assert schedule.smoothed()["a"] == pytest.approx(1.0, abs=1e-3)
    resumed = BlockSchedule()
    resumed.load_state_dict(schedule.state_dict())
    resumed.record({"a": 3.0})
    schedule.record({"a": 3.0})
    assert resumed.smoothed() == schedule.smoothed()
