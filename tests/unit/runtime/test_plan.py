"""Decisions of a phase's plan: precision and learning rate, each with its reason."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from caramba.config.train import PhaseConfig
from caramba.runtime import RuntimePlan, plan


def planned(d_model: int = 128, **settings: object) -> RuntimePlan:
    phase = PhaseConfig.model_validate({"phase": "blockwise", "steps": 5, **settings})
    return plan(phase, device="cpu", kernels="auto", ops={"quantize": "reference"}, name="x", d_model=d_model)


@pytest.mark.parametrize(
    ("settings", "dtype", "reason"),
    [
        ({}, "float32", "auto: float32 on cpu"),
        ({"dtype": "bfloat16"}, "bfloat16", "the manifest: dtype=bfloat16"),
        ({"use_amp": True, "amp_dtype": "bfloat16"}, "bfloat16", "the manifest: use_amp=true"),
        ({"use_amp": True, "dtype": "float32"}, "bfloat16", "the manifest: use_amp=true"),
        ({"use_amp": False}, "float32", "the manifest: use_amp=false"),
        ({"dtype": "float32"}, "float32", "the manifest: dtype=float32"),
    ],
)
def test_precision(settings: dict[str, object], dtype: str, reason: str) -> None:
    made = planned(**settings)
    assert made.value("dtype") == dtype
    assert made.value("precision") == {"float32": "32-true", "bfloat16": "bf16-mixed"}[dtype]
    assert made.decisions["dtype"].reason.startswith(reason)


def test_an_automatic_learning_rate_falls_with_the_width() -> None:
    assert planned(2048, lr="auto").value("lr") == 2e-4
    made = planned(128, lr="auto")
    assert made.value("lr") == pytest.approx(3.2e-3)
    assert made.decisions["lr"].reason == "auto: 0.0002 times (2048/128)^1"
    assert planned(128, lr=1e-3).decisions["lr"].reason == "the manifest"
    assert planned(2048, phase="global", objective="kl", lr="auto").value("lr") == 8e-5
    assert planned(128, phase="global", objective="kl", lr="auto").value("lr") == pytest.approx(3.2e-4)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"dtype": "bfloat16", "use_amp": False}, "use_amp=false forbids; remove one"),
        ({"lora": {"rank": 4}}, "lora belongs to phase=global, got phase=blockwise"),
        (
            {"phase": "global", "attention_kl": 0.1},
            "attention_kl belongs to phase=blockwise or drift, got phase=global",
        ),
        ({"phase": "global", "trainable": "maps"}, "trainable belongs to phase=blockwise or drift"),
        ({"phase": "global", "schedule": "sequential"}, "schedule belongs to phase=blockwise or drift"),
        ({"phase": "global", "cache_teacher_outputs": True}, "objective=ce reads no teacher outputs"),
        ({"phase": "global", "objective": "kl", "kl_weight": 0.2}, "kl_weight belongs to objective=mixed"),
        ({"objective": "mixed"}, "phase=blockwise has a loss of its own, got objective=mixed"),
        (
            {"phase": "global", "objective": "ce", "temperature": 2.0},
            "temperature belongs to objective=kl or mixed",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        planned(**settings)
