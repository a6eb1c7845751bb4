"""Accuracy on tasks of lm-evaluation-harness or of local files, teacher and student, as metrics of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from caramba.artifacts.items import to_column
from caramba.artifacts.statistics import detectable_difference, power_text
from caramba.config.benchmark import AccuracyBenchmarkConfig, BenchmarkConfig
from caramba.config.suite_file import SuiteFile
from caramba.console import logger
from caramba.data import Tokenizer
from caramba.errors import ConfigError
from caramba.evaluation.custom_suite import count_items, open_suites, score_suite
from caramba.evaluation.harness import count_documents, item_records, run_harness, task_manager
from caramba.evaluation.local_tasks import LocalTask, TaskScores, group_means, open_tasks, score_task
from caramba.evaluation.subject import Subjects
from caramba.model import Model
from caramba.result import ITEMS, Metric

# The metric that represents a task in the mean over tasks, the first that it has.
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
            if bench.config.eval_data is not None or bench.config.suites:
                _open_local(bench.config, tokenizer, where)
            else:
                _open(bench.config, tokenizer, where)


def accuracy(
    config: AccuracyBenchmarkConfig, subjects: Subjects, source: str
) -> tuple[list[Metric], list[dict[str, Any]]]:
    """Run the tasks on each model: one row and one metric per task and score of the harness.

    `standard_error` is the harness's, over `n` documents. `accuracy.<model>.mean` averages over tasks the metric of
    each (`acc`, else `exact_match`), its error following from theirs as independent.
    """
    if config.eval_data is not None or config.suites:
        return _local_accuracy(config, subjects, source)
    manager, tokenizer = _open(config, subjects.tokenizer, f"benchmarks.{source}")
    counted = count_documents(config.tasks, manager, config.limit)
    log_power(counted, config.smallest_difference, f"benchmarks.{source}")
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
        mains = {row["task"]: row for row in reversed(_main_rows(found))}
        for row in found:
            records = item_records(results, row["task"], row["metric"], row["filter"])
            is_main = mains.get(row["task"]) is row
            kept = {ITEMS: to_column(records, row["metric"], is_main=is_main)} if records else {}
            rows.append({"model": name} | row | kept)
        for row in found:
            where = f"task={row['task']}" + (f",filter={row['filter']}" if row["filter"] != NO_FILTER else "")
            key = f"accuracy.{name}.{row['metric']}@{where}"
            metrics.append(Metric(key, row["value"], "", row["documents"], None, source, row["standard_error"]))
        scores = [(row["value"], row["standard_error"]) for row in _main_rows(found)]
        if scores:
            metrics.append(_mean_metric(scores, name, source))
    return metrics, rows


def _open(config: AccuracyBenchmarkConfig, tokenizer: Tokenizer | None, where: str) -> tuple[Any, Tokenizer]:
    tokenizer = _need_tokenizer(tokenizer, where)
    return task_manager(config.tasks, config.include_path, where=where, option="include_path"), tokenizer


def _open_local(
    config: AccuracyBenchmarkConfig, tokenizer: Tokenizer | None, where: str
) -> tuple[list[LocalTask], list[SuiteFile], Tokenizer]:
    tokenizer = _need_tokenizer(tokenizer, where)
    names = [task for task in config.tasks if task not in config.suites]
    tasks = open_tasks(config.eval_data or "", names, limit=config.limit, where=where) if names else []
    suites = open_suites(config.suites, limit=config.limit, allow_code=config.allow_code, where=where)
    return tasks, suites, tokenizer


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
    """Score local tasks: one row and one metric per task and score; `standard_error` is over items."""
    tasks, suites, tokenizer = _open_local(config, subjects.tokenizer, f"benchmarks.{source}")
    counted = [(task.name, len(task.items)) for task in tasks if task.items] + count_items(suites)
    log_power(counted, config.smallest_difference, f"benchmarks.{source}")
    metrics: list[Metric] = []
    rows: list[dict[str, Any]] = []
    for name, model in subjects.models.items():
        results = list(
            score_local(
                *(tasks, suites, model, tokenizer),
                max_length=config.max_length or subjects.max_length,
                batch_size=config.batch_size,
                limit=config.limit,
            )
        )
        for result in results:
            for metric, (value, error) in result.scores.items():
                key = f"accuracy.{name}.{metric}@task={result.task}"
                metrics.append(Metric(key, value, "", result.n, None, source, error))
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
                    | _kept(result, metric)
                )
        # A suite under a change of its prompts is no task of its own.
        mains = [result for result in results if result.main in MAIN_LOCAL and not result.change]
        if mains:
            scores = [result.scores[result.main] for result in mains]
            metrics.append(_mean_metric(scores, name, source))
        metrics += [
            Metric(f"accuracy.{name}.mean@group={group}", value, "", None, None, source)
            for group, value in group_means(results).items()
        ]
    return metrics, rows


def score_local(
    tasks: Sequence[LocalTask],
    suites: Sequence[SuiteFile],
    model: Model,
    tokenizer: Tokenizer,
    *,
    max_length: int,
    batch_size: int,
    limit: int | None,
) -> Iterator[TaskScores]:
    """Score one model on local tasks, then on suites."""
    sizes = {"max_length": max_length, "batch_size": batch_size}
    for task in tasks:
        yield score_task(task, model.eval(), tokenizer, limit=limit, **sizes)
    for suite in suites:
        yield from score_suite(suite, model, tokenizer, **sizes)


def _mean_metric(scores: Sequence[tuple[float, float | None]], name: str, source: str) -> Metric:
    """Return the mean over tasks of each task's main score; the errors of tasks are taken as independent."""
    errors = [error for _, error in scores if error is not None]
    error = math.hypot(*errors) / len(errors) if len(errors) == len(scores) else None
    value = sum(value for value, _ in scores) / len(scores)
    return Metric(f"accuracy.{name}.mean@tasks={len(scores)}", value, "", len(scores), None, source, error)


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
                "standard_error": float(error) if isinstance(error, int | float) and math.isfinite(error) else None,
                "documents": counts.get("effective"),
                "fewshot": results.get("n-shot", {}).get(task),
                "version": results.get("versions", {}).get(task),
            }


def _main_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each task the row of the first metric of MAIN that it has; a group of tasks has no documents."""
    chosen: dict[str, dict[str, Any]] = {}
    for metric in MAIN:
        for row in rows:
            if row["metric"] == metric and row["documents"] is not None:
                chosen.setdefault(row["task"], row)
    return list(chosen.values())


def _kept(result: TaskScores, metric: str) -> dict[str, Any]:
    """Return the column of items of a local task, where its items have that metric; of a text the NLL of windows."""
    if not result.items or metric not in result.items[0]:
        return {}
    main = "nll" if result.kind == "text" else result.main
    return {ITEMS: to_column(result.items, metric, is_main=metric == main)}


def log_power(names: Sequence[tuple[str, int]], smallest: float | None, where: str) -> None:
    """Print what a comparison on each task's items can see; warn where that is coarser than `smallest` (a share)."""
    for task, n in names:
        logger.info(f"{where}: {task}: {power_text(n)}")
        seen = detectable_difference(n)
        if smallest is not None and (seen is None or seen > smallest):
            can = "no difference" if seen is None else f"{100 * seen:.1f} points"
            logger.warning(
                f"{where}: {task}: {n:,} items can see {can}, smallest_difference asks for {100 * smallest:.1f}; "
                "use more items (limit), or ask for less"
            )
