"""Benchmarks and checks of plugins: called on models, their numbers checked and named."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from caramba.artifacts.key import MetricKey
from caramba.config.extension import (
    ExtensionConfig,
    OwnBenchmarkConfig,
    OwnCheckConfig,
    build_extension,
    user_traceback,
)
from caramba.data import TokenDataset
from caramba.errors import CarambaError, ExtensionFailedError
from caramba.evaluation.subject import Subjects
from caramba.model import Model
from caramba.result import Check, Metric


def own_benchmark(
    config: OwnBenchmarkConfig, subjects: Subjects, source: str
) -> tuple[list[Metric], list[dict[str, Any]]]:
    """Measure every model with the benchmark of a plugin; its numbers are the metrics `TYPE.MODEL.NAME`.

    Raises:
        ExtensionFailedError: it raised, or returned other than finite numbers by name.
    """
    measure = build_extension(config, config)
    metrics: list[Metric] = []
    rows: list[dict[str, Any]] = []
    for name, model in subjects.models.items():
        found = _numbers(config, lambda model=model: measure(model.eval(), subjects.windows, subjects.tokenizer))
        metrics += [
            Metric(str(MetricKey(config.type, name, key)), value, "", source=source) for key, value in found.items()
        ]
        rows.append({"model": name} | found)
    return metrics, rows


def own_check(
    config: OwnCheckConfig, teacher: Model, student: Model, windows: Callable[[int], TokenDataset]
) -> tuple[Check, ...]:
    """Compare a student with its teacher by the check of a plugin, under the bounds of the manifest.

    Raises:
        ExtensionFailedError: as `own_benchmark`, or a bound of a number that it did not return.
    """
    compare = build_extension(config, config)
    found = _numbers(config, lambda: compare(teacher, student, windows))
    for name in (*config.max, *config.min):
        if name not in found:
            raise ExtensionFailedError(
                f"{config.key} ({config.type}): a bound of {name!r}, and it returned {', '.join(found) or 'nothing'}"
            )
    checks: list[Check] = []
    for name, value in found.items():
        if name in config.max or name not in config.min:
            checks.append(Check(name, value, config.max.get(name)))
        if name in config.min:
            least = f"{name}_min" if name in config.max else name
            checks.append(Check(least, value, config.min[name], is_minimum=True))
    return tuple(checks)


def _numbers(config: ExtensionConfig, call: Callable[[], Any]) -> dict[str, float]:
    where = f"{config.key} ({config.type})"
    try:
        with torch.no_grad():
            found = call()
    except CarambaError:
        raise
    except Exception as error:
        raise ExtensionFailedError(f"{where} failed: {user_traceback(error)}") from error
    if not isinstance(found, Mapping):
        raise ExtensionFailedError(f"{where} returned {type(found).__name__}, expected numbers by name")
    numbers: dict[str, float] = {}
    for name, value in found.items():
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError):
            raise ExtensionFailedError(
                f"{where} returned {type(value).__name__} as {name!r}, expected a number"
            ) from None
        if not math.isfinite(numbers[str(name)]):
            raise ExtensionFailedError(f"{where} returned {value} as {name!r}, expected a finite number")
    return numbers
