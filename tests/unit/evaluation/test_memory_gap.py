"""The memory_gap benchmark on tiny models: the teacher's gain, the share that is closed, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.surgery.test_memory_surgery import WINDOW, memory_spec, model_spec

from caramba.artifacts.metrics import collect
from caramba.config.benchmark import MemoryGapBenchmarkConfig
from caramba.config.model import SurgeryConfig
from caramba.data import TokenDataset
from caramba.errors import ConfigError
from caramba.evaluation.memory_gap import memory_gap, with_window
from caramba.evaluation.perplexity import position_nll
from caramba.evaluation.subject import Subjects
from caramba.model import Model, build_model
from caramba.result import BenchmarkResult, RunResult
from caramba.surgery import transplant

CPU = torch.device("cpu")
LENGTH, START = 40, 20


def config(**changes: Any) -> MemoryGapBenchmarkConfig:
    given: dict[str, Any] = {
        "type": "memory_gap",
        "block_size": LENGTH,
        "windows": 6,
        "batch_size": 2,
        "start": START,
    }
    given["min_gain"] = 1e-3
    return MemoryGapBenchmarkConfig.model_validate(given | changes)


def teacher_and_student() -> dict[str, Model]:
    teacher, student = build_model(model_spec(), seed=1).eval(), build_model(memory_spec(), seed=2).eval()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    transplant(teacher, student, SurgeryConfig(method="memory"))
    return {"teacher": teacher, "student": student}


def text_of(teacher: Model) -> np.ndarray:
    """Return text that the teacher wrote, so that what it sees far back helps it."""
    tokens = torch.tensor([[3]])
    generator = torch.Generator().manual_seed(5)
    with torch.inference_mode():
        while tokens.shape[1] < 400:
            p = teacher(tokens[:, -(tokens.shape[1] % LENGTH or LENGTH) :])[:, -1].softmax(-1)
            tokens = torch.cat((tokens, torch.multinomial(p, 1, generator=generator)), 1)
    return tokens[0].numpy()


def subjects(text: np.ndarray, models: dict[str, Model]) -> Subjects:
    return Subjects(models, lambda size: TokenDataset(text, size), None, 61, CPU)


def test_gain_and_share_are_those_of_losses_by_position_and_near_changes_nothing() -> None:
    models = teacher_and_student()
    text = text_of(models["teacher"])
    metrics, rows = memory_gap(config(), subjects(text, models), "gap")
    values = {metric.key.partition("@")[0]: metric for metric in metrics}
    windows = TokenDataset(text, LENGTH)
    full, window, ours = (
        position_nll(model, windows, 6, 3, CPU)[:, START:].mean()
        for model in (models["teacher"], with_window(models["teacher"], WINDOW), models["student"])
    )
    gain = values["memory_gap.teacher.gain"]
    assert gain.value == pytest.approx(float(window - full))
    assert gain.value > 1e-3
    assert values["memory_gap.student.closed"].value == pytest.approx(float((window - ours) / (window - full)))
    assert abs(values["memory_gap.student.near"].value) < 1e-5
    assert all(metric.n == 6 and metric.standard_error is not None for metric in metrics)
    assert [row["model"] for row in rows] == [name for name in ("teacher", "window", "student") for _ in range(6)]
    bench = BenchmarkResult("gap", "memory_gap", tuple(metrics), tuple(rows))
    assert len(collect(RunResult("memory", "id", "0", None, {}, {}, benchmarks=(bench,)))) == 3


def test_a_teacher_as_student_closes_all_and_its_window_nothing() -> None:
    teacher = teacher_and_student()["teacher"]
    text = text_of(teacher)
    for student, closed in ((teacher, 1.0), (with_window(teacher, WINDOW), 0.0)):
        given = subjects(text, {"teacher": teacher, "student": student})
        metrics, _ = memory_gap(config(local_window=WINDOW), given, "gap")
        assert metrics[-1].key.startswith("memory_gap.student.closed@")
        assert metrics[-1].value == pytest.approx(closed)


def test_a_gain_without_power_leaves_the_share_out() -> None:
    models = teacher_and_student()
    metrics, rows = memory_gap(config(min_gain=50.0), subjects(text_of(models["teacher"]), models), "gap")
    assert [metric.key.partition("@")[0] for metric in metrics] == [
        "memory_gap.teacher.gain",
        "memory_gap.student.near",
    ]
    assert "is below min_gain=50" in rows[-1]["skipped"]


def test_the_teacher_alone_is_measured_before_there_is_a_student() -> None:
    models = teacher_and_student()
    text = text_of(models["teacher"])
    alone, _ = memory_gap(config(local_window=WINDOW), subjects(text, {"teacher": models["teacher"]}), "gap")
    both, _ = memory_gap(config(), subjects(text, models), "gap")
    assert alone == both[:1]


@pytest.mark.parametrize(
    ("names", "changes", "message"),
    [
        (("student",), {}, "got no teacher"),
        (("teacher",), {}, "neither local_window nor a student"),
        (("teacher", "student"), {"start": WINDOW - 1}, "in rising order"),
        (("teacher", "student"), {"start": LENGTH}, "in rising order"),
    ],
)
def test_what_cannot_be_compared_is_refused(names: tuple[str, ...], changes: dict[str, Any], message: str) -> None:
    models = teacher_and_student()
    given = subjects(np.arange(400) % 61, {name: models[name] for name in names})
    with pytest.raises(ConfigError, match=message):
        memory_gap(config(**changes), given, "gap")


def test_a_teacher_with_a_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="has a window of 4 already"):
        with_window(build_model(model_spec(local_window=4)), WINDOW)
