"""The distance to the teacher's residual stream: its value, its weight over a phase, and what it needs."""

from __future__ import annotations

import copy

import pytest
import torch

from caramba.config.train import PhaseConfig
from caramba.data import IGNORED
from caramba.distill import LanguageModelObjective, TeacherLogitsObjective
from caramba.distill.objective import ResidualDistance
from caramba.errors import ConfigError
from caramba.model import Trace, build_model
from caramba.model.topology import ResidualTopology
from tests.unit.surgery.test_weight_svd import TOKENS, spec, student_spec


def test_the_distance_is_that_of_the_streams_after_every_block() -> None:
    teacher = build_model(spec(), seed=1).double().requires_grad_(False)
    student = build_model(student_spec(4, 8, 8), seed=2).double()
    x, y = TOKENS[:, :-1], TOKENS[:, 1:].clone()
    y[0, :3] = IGNORED
    streams = []
    for model in (student, teacher):
        with Trace(model, lambda _name, module: isinstance(module, ResidualTopology)) as trace:
            model.hidden(x)
        streams.append(torch.stack([record.output for record in trace.records]).detach())
    ours, theirs = streams
    each = (ours - theirs).square().sum(-1) / theirs.square().sum(-1)
    want = each[:, y != IGNORED].mean()
    found, first = {}, next(student.parameters())
    for progress in (0, 3, 4):
        objective = TeacherLogitsObjective(student, teacher, hidden_weight=2.0)
        objective.at(progress, 4)
        student.zero_grad()
        total = []
        losses = objective.step((x, y), lambda loss, total=total: total.append(loss) or loss.backward())
        torch.testing.assert_close(losses["hidden"], want)
        torch.testing.assert_close(total[0] - losses["loss"], 2.0 * (1 - progress / 4) * want)
        found[progress] = first.grad.clone()
    plain = TeacherLogitsObjective(student, teacher)
    student.zero_grad()
    plain.step((x, y), lambda loss: loss.backward())
    torch.testing.assert_close(found[4], first.grad)
    torch.testing.assert_close(found[3] - found[4], (found[0] - found[4]) / 4)
    assert not any(block._forward_hooks for block in student.modules()), "hooks must be removed"
    twin = TeacherLogitsObjective(copy.deepcopy(teacher).requires_grad_(), teacher, hidden_weight=1.0)
    assert twin.step((x, y), lambda loss: loss.backward())["hidden"] == 0


def test_what_it_needs() -> None:
    teacher, student = build_model(spec(), seed=1), build_model(student_spec(4, 8, 8), seed=2)
    del student.topology.layers[0].layers[-1]
    with pytest.raises(ConfigError, match=r"the student has \d+ residual blocks, the teacher \d+"):
        ResidualDistance(student, teacher)
    assert LanguageModelObjective(student).at(1, 2) is None
    for keys, got in (
        ({}, "objective=ce"),
        ({"objective": "kl", "cache_teacher_outputs": True}, "cache_teacher_outputs"),
    ):
        with pytest.raises(ValueError, match=rf"hidden_weight compares every block.*got {got}"):
            PhaseConfig(phase="global", steps=2, hidden_weight=1.0, **keys)
