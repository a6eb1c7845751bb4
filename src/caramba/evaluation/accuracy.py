"""Accuracy on tasks of lm-evaluation-harness or of local files, teacher and student, as metrics of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from caramba.config.benchmark import AccuracyBenchmarkConfig, BenchmarkConfig
from caramba.data import Tokenizer
from caramba.errors import ConfigError
from caramba.evaluation.harness import run_harness, task_manager
from caramba.evaluation.local_tasks import LocalTask, TaskScores, group_means, open_tasks, score_task
from caramba.evaluation.subject import Subjects
from caramba.result import Metric

# The metric that stands for a task in the mean over tasks, the first that it has.
MAIN = ("acc", "exact_match")
MAIN_LOCAL = ("acc", "acc_norm")
NO_FILTER = "none"


def check_accuracy(benchmarks: Sequence[BenchmarkConfig], tokenizer: Tokenizer | None) -> None:
    """Refuse, before anything trains, tasks that could not run after it.

    Raises:
        ConfigError: the harness is not installed, a task or folder does not exist, or the data has no tokenizer.
    """
    for bench in benchmarks:
        if isinstance(bench.config, AccuracyBenchmarkConfig):
            where = f"benchmarks.{bench.id}"
            if bench.config.eval_data is not None:
                _open_local(bench.config, tokenizer, where)
            else:
                _open(bench.config, tokenizer, where)


def accuracy(
    config: AccuracyBenchmarkConfig, subjects: Subjects, source: str
) -> tuple[list[Metric], list[dict[str, Any]]]:
    """Run the tasks on each model: one row and one metric per task and score of the harness.

    `std` is the harness's standard error over `n` documents. `accuracy.<model>.mean` averages over tasks what stands
    for each (`acc`, else `exact_match`), its error following from theirs as independent.
    """
    if config.eval_data is not None:
        return _local_accuracy(config, subjects, source)
    manager, tokenizer = _open(config, subjects.tokenizer, f"benchmarks.{source}")
    metrics: list[Metric] = []
    rows: list[dict[str, Any]] = []
    for name, model in subjects.models.items():
        results = run_harness(
            model.eval(),
            tokenizer,
            config.tasks,
            manager,
            max_length=config.max_length or subjects.max_length,
            batch_size=config.batch_size,
            limit=config.limit,
            num_fewshot=config.num_fewshot,
        )
        found = list(_scores(results))
        rows += [{"model": name} | row for row in found]
        for row in found:
            where = f"task={row['task']}" + (f",filter={row['filter']}" if row["filter"] != NO_FILTER else "")
            key = f"accuracy.{name}.{row['metric']}@{where}"
            metrics.append(Metric(key, row["value"], "", row["documents"], row["standard_error"], source))
        metrics += _mean(found, name, source)
    return metrics, rows


def _open(config: AccuracyBenchmarkConfig, tokenizer: Tokenizer | None, where: str) -> tuple[Any, Tokenizer]:
    tokenizer = _need_tokenizer(tokenizer, where)
    return task_manager(config.tasks, config.include_path, where=where, option="include_path"), tokenizer


def _open_local(
    config: AccuracyBenchmarkConfig, tokenizer: Tokenizer | None, where: str
) -> tuple[list[LocalTask], Tokenizer]:
    tokenizer = _need_tokenizer(tokenizer, where)
    assert config.eval_data is not None
    return open_tasks(config.eval_data, config.tasks, limit=config.limit, where=where), tokenizer


def _need_tokenizer(tokenizer: Tokenizer | None, where: str) -> Tokenizer:
    if tokenizer is None:
        raise ConfigError(
            f"{where}: accuracy needs a tokenizer, and the run's data does not say which one made it; use a token "
            "folder (caramba prepare) or data=stdlib"
        )
    return tokenizer


def _local_accuracy(
    config: AccuracyBenchmarkConfig, subjects: Subjects, source: str
) -> tuple[list[Metric], list[dict[str, Any]]]:
    """Score local tasks: one row and one metric per task and score; `std` is the standard error over items."""
    tasks, tokenizer = _open_local(config, subjects.tokenizer, f"benchmarks.{source}")
    metrics: list[Metric] = []
    rows: list[dict[str, Any]] = []
    for name, model in subjects.models.items():
        results = [
            score_task(
                task,
                model.eval(),
                tokenizer,
                max_length=config.max_length or subjects.max_length,
                batch_size=config.batch_size,
                limit=config.limit,
            )
            for task in tasks
        ]
        for result in results:
            for metric, (value, error) in result.scores.items():
                key = f"accuracy.{name}.{metric}@task={result.task}"
                metrics.append(Metric(key, value, "", result.n, error, source))
                rows.append(
                    {
                        "model": name,
                        "task": result.task,
                        "metric": metric,
                        "filter": NO_FILTER,
                        "value": value,
                        "standard_error": error,
                        "documents": result.n,
                        "fewshot": 0,
                        "version": None,
                    }
                )
        mains = [result for result in results if result.main in MAIN_LOCAL]
        if mains:
            metrics.append(_mean_of(mains, name, source))
        metrics += [
            Metric(f"accuracy.{name}.mean@group={group}", value, "", None, None, source)
            for group, value in group_means(results).items()
        ]
    return metrics, rows


def _mean_of(results: Sequence[TaskScores], name: str, source: str) -> Metric:
    """Return the mean over tasks of each task's main score; the errors of tasks are taken as independent."""
    scores = [result.scores[result.main] for result in results]
    errors = [error for _, error in scores if error is not None]
    std = math.hypot(*errors) / len(errors) if len(errors) == len(scores) else None
    value = sum(value for value, _ in scores) / len(scores)
    return Metric(f"accuracy.{name}.mean@tasks={len(scores)}", value, "", len(scores), std, source)


def _scores(results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the harness's scores, one row each; its keys are `metric,filter` and `metric_stderr,filter`."""
    for task, found in results["results"].items():
        counts = results["n-samples"].get(task, {})
        for key, value in found.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = found.get(f"{metric}_stderr,{filter_name}")
            yield {
                "task": task,
                "metric": metric,
                "filter": filter_name,
                "value": float(value),
                "standard_error": float(error)
                if isinstance(error, int | float) and math.isfinite(error)
                else None,
                "documents": counts.get("effective"),
                "fewshot": results.get("n-shot", {}).get(task),
                "version": results.get("versions", {}).get(task),
            }


def _mean(rows: Sequence[dict[str, Any]], name: str, source: str) -> list[Metric]:
    chosen: dict[str, dict[str, Any]] = {}
    for metric in MAIN:
        for row in rows:
            if (
                row["metric"] == metric and row["documents"] is not None
            ):  # a group of tasks has no documents itself
                chosen.setdefault(row["task"], row)
    if not chosen:
        return []
    values = [row["value"] for row in chosen.values()]
    errors = [row["standard_error"] for row in chosen.values()]
    known = [error for error in errors if error is not None]
    std = math.hypot(*known) / len(errors) if len(known) == len(errors) else None
    key = f"accuracy.{name}.mean@tasks={len(values)}"
    return [Metric(key, sum(values) / len(values), "", len(values), std, source)]
