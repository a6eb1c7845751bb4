"""How much of what a teacher gains beyond a window its student with memory slots keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from caramba.config.benchmark import MemoryGapBenchmarkConfig
from caramba.config.model import ModelSpec
from caramba.config.source import is_mapping
from caramba.console import logger
from caramba.errors import ConfigError
from caramba.evaluation.perplexity import position_nll
from caramba.evaluation.subject import Subjects
from caramba.model import Model, build_model
from caramba.model.memory import memory_layers
from caramba.result import Metric

NEEDED = "model=hf_memory makes both"


def memory_gap(
    config: MemoryGapBenchmarkConfig, subjects: Subjects, source: str
) -> tuple[list[Metric], list[dict[str, Any]]]:
    """Measure the teacher's `gain` beyond a window, then the student's `near` and `closed`, on the same windows.

    The gain is what the teacher loses at positions `start` on with its last `local_window` tokens alone. `near` is the
    student's change at positions below the window. `closed` is the share of the gain that it keeps.
    Losses are in nats a token, standard errors over windows. A gain below `min_gain` has no share; a row reports it.

    Raises:
        ConfigError: no teacher, neither window nor slots, a teacher with windows, or a window beyond `start`.
    """
    teacher, student = (subjects.models.get(name) for name in ("teacher", "student"))
    if teacher is None:
        raise ConfigError(f"benchmark memory_gap: got no teacher to compare with; {NEEDED}")
    window = _window(config, student)
    if not window <= config.start < config.block_size:
        raise ConfigError(
            f"benchmark memory_gap: window {window}, start={config.start}, block_size={config.block_size}; expected "
            "them in rising order"
        )
    text = subjects.windows(config.block_size)

    def losses(model: Model) -> Tensor:
        return position_nll(model.eval(), text, config.windows, config.batch_size, subjects.device)

    full = losses(teacher)
    near, far = slice(0, window), slice(config.start, None)
    of_full, of_window = _means(full, far), _means(losses(with_window(teacher, window)), far)
    where = f"@window={window},from={config.start},length={config.block_size}"
    gain = of_window - of_full
    metrics = [_metric("teacher.gain", where, gain, source)]
    logger.info(f"the teacher gains {gain.mean():.4f} nats beyond a window of {window} tokens")
    rows = _rows("teacher", of_full) + _rows("window", of_window)
    if student is None:
        return metrics, rows
    ours = losses(student)
    of_student = _means(ours, far)
    rows += _rows("student", of_student)
    metrics.append(_metric("student.near", f"@window={window}", _means(ours, near) - _means(full, near), source))
    if gain.mean() < config.min_gain:
        reason = (
            f"gain {gain.mean():.4f} nats is below min_gain={config.min_gain:g}; use longer documents or a smaller "
            "window"
        )
        logger.warning(f"benchmark memory_gap: {reason}")
        return metrics, [*rows, {"model": "student", "skipped": reason}]
    closed = Share.of(of_window - of_student, gain)
    metrics.append(
        Metric(f"memory_gap.student.closed{where}", closed.value, "share", len(gain), None, source, closed.error)
    )
    return metrics, rows


@dataclass(frozen=True)
class Share:
    """A ratio of two means over the same windows and its standard error, to first order."""

    value: float
    error: float | None

    @classmethod
    def of(cls, part: Tensor, whole: Tensor) -> Share:
        share = float(part.mean() / whole.mean())
        return cls(share, _error((part - share * whole) / whole.mean()))


def with_window(model: Model, window: int) -> Model:
    """Return a model of the same weights whose attention layers see the last `window` tokens alone.

    Raises:
        ConfigError: a layer has a window already.
    """
    spec = model.spec.model_dump(mode="json")
    _set_window(spec["topology"], window)
    found = build_model(ModelSpec.model_validate(spec), device="meta")
    found.load_state_dict(model.state_dict(), assign=True)
    return found.eval()


def _set_window(node: Any, window: int) -> None:
    if isinstance(node, list):
        for item in node:
            _set_window(item, window)
    elif is_mapping(node):
        if node.get("type") == "AttentionLayer":
            if node.get("local_window") is not None:
                raise ConfigError(
                    f"benchmark memory_gap: the teacher has a window of {node['local_window']} already; use a teacher "
                    "of full attention"
                )
            node["local_window"] = window
        for value in node.values():
            _set_window(value, window)


def _window(config: MemoryGapBenchmarkConfig, student: Model | None) -> int:
    """Return the window that the config states, else the student's longest."""
    if config.local_window is not None:
        return config.local_window
    if student is None:
        raise ConfigError(f"benchmark memory_gap: got neither local_window nor a student with slots; {NEEDED}")
    return max(layer.config.local_window or 0 for layer in memory_layers(student).values())


def _means(losses: Tensor, part: slice) -> Tensor:
    """Return each window's mean over some positions, [windows, T] to [windows]; without windows that have none."""
    found = losses[:, part].nanmean(1)
    return found[~found.isnan()]


def _error(values: Tensor) -> float | None:
    return float(values.std() / math.sqrt(len(values))) if len(values) > 1 else None


def _metric(name: str, where: str, values: Tensor, source: str) -> Metric:
    key, n = f"memory_gap.{name}{where}", len(values)
    return Metric(key, float(values.mean()), "nats", n, None, source, _error(values))


def _rows(model: str, values: Tensor) -> list[dict[str, Any]]:
    return [{"model": model, "window": place, "nll": nll} for place, nll in enumerate(values.tolist())]
