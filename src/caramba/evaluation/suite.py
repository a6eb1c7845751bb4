"""Run a suite of benchmarks; one that fails is recorded with its error, and the others still run."""

from __future__ import annotations

import dataclasses
import importlib
import math
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from caramba.config.benchmark import BenchmarkConfig, Measurement
from caramba.config.extension import OwnBenchmarkConfig
from caramba.console import logger
from caramba.errors import ConfigError
from caramba.evaluation.own import own_benchmark
from caramba.evaluation.subject import Subjects
from caramba.lower.lowering import lower
from caramba.result import BenchmarkResult, Metric

Measured = tuple[list[Metric], list[dict[str, Any]]]


def run_benchmark(bench: BenchmarkConfig, subjects: Subjects) -> Measured:
    """Run one benchmark on the models that it names, `repeats` times; metrics of repeats are averaged, rows kept.

    Raises:
        ConfigError: a benchmark that runs as stages of a group.
    """
    chosen = {name: model for name, model in subjects.models.items() if _is_asked(name, bench.models)}
    narrowed = dataclasses.replace(subjects, models=chosen)
    with ExitStack() as stack:
        for model in chosen.values():
            stack.enter_context(lower(model, subjects.device, "prefill"))
        repeats = [_dispatch(bench, narrowed) for _ in range(bench.repeats)]
    rows = [{"repeat": index} | row for index, (_, found) in enumerate(repeats) for row in found]
    return _average([metrics for metrics, _ in repeats]), rows


def _is_asked(name: str, models: Sequence[str]) -> bool:
    """Whether a benchmark of `models` takes a row: those of its roles, and any that is of neither role."""
    role = name.split("_")[0]
    return role in models or role not in ("teacher", "student")


def _dispatch(bench: BenchmarkConfig, subjects: Subjects) -> Measured:
    config = bench.config
    if isinstance(config, OwnBenchmarkConfig):
        return own_benchmark(config, subjects, bench.id)
    if isinstance(config, Measurement):
        module, _, name = config.target.partition(":")
        return getattr(importlib.import_module(module), name)(config, subjects, bench.id)
    raise ConfigError(
        f"benchmarks.{bench.id}: type={config.type!r} runs as stages of a group, not on finished models; remove it"
    )


def _average(repeats: Sequence[list[Metric]]) -> list[Metric]:
    if len(repeats) == 1:
        return repeats[0]
    return [pool_metrics(same) for same in zip(*repeats, strict=True)]


def pool_metrics(same: Sequence[Metric]) -> Metric:
    """Return one metric of two or more repeats: the mean, and a deviation of what varies within and between them.

    Repeats that have no deviation of their own are the samples themselves. Otherwise the variance is the mean of
    theirs plus that of their values, so that repeating what cannot differ, as a loss on the same windows, does not
    call its error zero; and `n` counts the samples of all, or those of one where every repeat has the same value.
    """
    values = [metric.value for metric in same]
    within = [metric.spread for metric in same if metric.spread is not None]
    between = statistics.stdev(values)
    if len(within) < len(same):
        return dataclasses.replace(
            same[0], value=statistics.fmean(values), n=len(values), std=between, standard_error=None
        )
    spread = math.hypot(math.sqrt(statistics.fmean(each**2 for each in within)), between)
    counts = [metric.n for metric in same if metric.n is not None]
    n = sum(counts) if between and counts else same[0].n
    kind = "std" if same[0].standard_error is None else "standard_error"
    return dataclasses.replace(same[0], value=statistics.fmean(values), n=n, **{kind: spread})


def run_suite(benchmarks: Sequence[BenchmarkConfig], subjects: Subjects) -> tuple[BenchmarkResult, ...]:
    """Run benchmarks in order and return one result each, failed ones with their error."""
    results = []
    for bench in benchmarks:
        began = time.perf_counter()
        try:
            metrics, rows = run_benchmark(bench, subjects)
        except Exception as error:  # recorded in report.json and reported as exit status 1 by the worker
            logger.error(f"benchmark {bench.id}: {type(error).__name__}: {error}")
            results.append(
                BenchmarkResult(
                    bench.id,
                    bench.config.type,
                    error=f"{type(error).__name__}: {error}",
                    seconds=time.perf_counter() - began,
                )
            )
            continue
        results.append(
            BenchmarkResult(
                bench.id, bench.config.type, tuple(metrics), tuple(rows), seconds=time.perf_counter() - began
            )
        )
    return tuple(results)
