"""Runs tasks of lm-evaluation-harness on a caramba model. The harness is imported when it is called."""

# pyright: reportMissingImports=false, reportArgumentType=false, reportReturnType=false
# The library is an optional extra, and its own annotations are loose.

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from caramba.config.extras import need_harness
from caramba.config.names import nearest
from caramba.data import Tokenizer
from caramba.errors import ConfigError
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
            raise ConfigError(
                f"{where}: {option} {include_path} is not a folder; name one with task YAML files"
            )
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
        log_samples=False,
        bootstrap_iters=BOOTSTRAPS,
    )
    assert results is not None
    return results
