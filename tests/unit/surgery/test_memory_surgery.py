"""Surgery to memory slots: the teacher's attention within its window, only gates new."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from caramba.config.model import ModelSpec, SurgeryConfig
from caramba.errors import ConfigError
from caramba.model import build_model
from caramba.model.memory import memory_layers
from caramba.surgery import transplant
from tests.unit.model.model_specs import VOCAB, block, spec

HEADS: dict[str, Any] = {
    "n_heads": 4,
    "n_kv_heads": 2,
    "mode": "gqa",
    "head_dim": 6,
    "bias": "qkv",
    "d_model": 16,
}
WINDOW = 9


def model_spec(**attention: Any) -> ModelSpec:
    layer = {"type": "AttentionLayer", **HEADS, **attention}
    one = block("standard")
    one["layers"][0]["layers"][1] = layer
    return spec(one, one)


def memory_spec(**changes: Any) -> ModelSpec:
    return model_spec(**{"type": "MemoryBankLayer", "local_window": WINDOW, "memory_slots": 4, **changes})


def test_student_equals_its_teacher_within_the_window_and_only_gates_are_new() -> None:
    teacher, student = build_model(model_spec(), seed=1).eval(), build_model(memory_spec(), seed=2).eval()
    gates = {name: x.clone() for name, x in student.state_dict().items() if "slot_gate" in name}
    report = transplant(teacher, student, SurgeryConfig(method="memory"))
    tokens = torch.randint(VOCAB, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs, ours = teacher(tokens), student(tokens)
    torch.testing.assert_close(ours[:, :WINDOW], theirs[:, :WINDOW], atol=1e-5, rtol=1e-5)
    assert (ours[:, WINDOW + 1 :] - theirs[:, WINDOW + 1 :]).abs().max() > 1e-4
    state = student.state_dict()
    assert len(gates) == 2 * len(memory_layers(student))
    assert all(torch.equal(state[name], x) for name, x in gates.items())
    assert all(torch.equal(state[name], x) for name, x in teacher.state_dict().items())
    assert report.unmapped_teacher == ()


@pytest.mark.parametrize(
    ("teacher", "student", "message"),
    [
        ({}, {"n_kv_heads": 4, "mode": "standard"}, "copies the teacher's heads"),
        ({"local_window": 4}, {}, "hides; use at most that"),
        ({}, {"rope_base": 5e5}, "rope_base is 500000.0 in the student"),
        ({"null_attn": True}, {}, "null_attn is False in the student, True in the teacher"),
    ],
)
def test_a_student_that_would_compute_otherwise_is_refused(
    teacher: dict[str, Any], student: dict[str, Any], message: str
) -> None:
    models = build_model(model_spec(**teacher)), build_model(memory_spec(**student))
    with pytest.raises(ConfigError, match=message):
        transplant(*models, SurgeryConfig(method="memory"))


def test_other_layers_are_no_student_of_this_method() -> None:
    models = build_model(model_spec()), build_model(model_spec(local_window=WINDOW))
    with pytest.raises(ConfigError, match="the student needs a MemoryBankLayer of mode standard or gqa"):
        transplant(*models, SurgeryConfig(method="memory"))
