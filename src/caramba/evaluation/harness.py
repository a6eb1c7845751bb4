"""Runs tasks of lm-evaluation-harness on a caramba model. The harness is imported when it is called."""

# pyright: reportMissingImports=false, reportArgumentType=false, reportReturnType=false
# The library is an optional extra, and its own annotations are loose.

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from caramba.config.optional_deps import need_harness
from caramba.data import Tokenizer
from caramba.errors import ConfigError, nearest
from caramba.model import Model

BOOTSTRAPS = 1000  # samples behind the standard error of metrics that have no formula for it


def task_manager(tasks: Sequence[str], include_path: str | None, *, where: str, option: str) -> Any:
    """Return the harness's index of tasks, all of `tasks` known to it.

    Args:
        tasks: names, groups or patterns.
        include_path: a folder of task YAML files, which is indexed alone when it has every task: the harness's own
            take a while.
        where: what the errors call the caller; `option` what they call `include_path`.

    Raises:
        ConfigError: the harness is not installed, no such folder, or no task of that name, with the nearest one.
    """
    need_harness(where)
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        if not Path(include_path).is_dir():
            raise ConfigError(f"{where}: {option} {include_path} is not a folder; name one with task YAML files")
        own = TaskManager(include_path=include_path, include_defaults=False)
        if tasks and all(own.match_tasks([task]) for task in tasks):
            return own
    manager = TaskManager(include_path=include_path)
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown or not tasks:
        name = unknown[0] if unknown else ""
        raise ConfigError(
            f"{where}: no task is called {name!r}{nearest(name, manager.all_tasks) or ';'} add a folder of your own "
            f"with {option}"
        )
    return manager


def run_harness(
    model: Model,
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    manager: Any,
    *,
    max_length: int,
    batch_size: int,
    limit: int | None = None,
    num_fewshot: int | None = None,
) -> dict[str, Any]:
    """Return what the harness reports of one model: "results" by task and metric, "n-samples", "versions" and more."""
    from lm_eval.evaluator import simple_evaluate

    from caramba.evaluation.lm_eval import CarambaLM

    results = simple_evaluate(
        model=CarambaLM(model, tokenizer, max_length=max_length, batch_size=batch_size),
        tasks=manager.match_tasks(list(tasks)),
        task_manager=manager,
        limit=limit,
        num_fewshot=num_fewshot,
        log_samples=True,
        bootstrap_iters=BOOTSTRAPS,
    )
    assert results is not None
    return results


def count_documents(tasks: Sequence[str], manager: Any, limit: int | None) -> list[tuple[str, int]]:
    """Return each task with the number of its documents that are scored, before anything is."""
    from lm_eval.tasks import get_task_dict

    counts: list[tuple[str, int]] = []

    def count(found: dict[Any, Any]) -> None:
        for name, task in found.items():
            if isinstance(task, dict):  # a group
                count(task)
            else:
                n = len(task.eval_docs)
                counts.append((str(name), n if limit is None else min(n, limit)))

    count(get_task_dict(manager.match_tasks(list(tasks)), manager))
    return counts


def item_records(results: dict[str, Any], task: str, metric: str, filter_name: str) -> list[dict[str, Any]]:
    """Return one record for each document of a task, in order: id, sum of the text, cluster and the metric's score.

    Empty for a group of tasks, and where the metric has no number for each document.
    """
    samples = sorted(
        (item for item in results.get("samples", {}).get(task, ()) if item["filter"] == filter_name),
        key=lambda item: item["doc_id"],
    )
    if not samples or not all(isinstance(item.get(metric), int | float) for item in samples):
        return []
    return [
        {
            "id": str(item["doc_id"]),
            "text_sha256": item["doc_hash"][:16],
            "cluster": item["prompt_hash"][:16],
            metric: float(item[metric]),
        }
        for item in samples
    ]
