"""`caramba eval RUN --tasks A,B`: tasks of lm-evaluation-harness on a trained model."""

# pyright: reportMissingImports=false, reportArgumentType=false
# The library is an optional extra, and its own annotations are loose.

from __future__ import annotations

import argparse
import importlib.util
import json
import math
from importlib.metadata import version
from pathlib import Path
from typing import Any

from caramba.config.names import nearest
from caramba.console import logger
from caramba.errors import ConfigError
from caramba.infer.opened import OpenedModel, need_tokenizer, open_model
from caramba.runs.files import write_json
from caramba.runtime import choose_device

OLDEST = (0, 4, 13)
BOOTSTRAPS = 1000  # samples behind the standard error of metrics that have no formula for it
USAGE = "caramba eval RUN --tasks A,B [--limit N] [--include-path DIR] [--which teacher|student]"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise ConfigError(f"eval: {message}; {USAGE}")


def evaluate(argv: list[str]) -> int:
    """Run the command and return the exit status.

    Raises:
        ConfigError: the extra is not installed, a wrong argument, an unknown run or task.
    """
    words = _parse(argv)
    logger.quiet = words.quiet
    _need_harness()
    opened = open_model(words.run, role=words.which, device=choose_device(words.device))
    results = run_tasks(
        opened,
        [task.strip() for task in words.tasks.split(",") if task.strip()],
        limit=words.limit,
        include_path=words.include_path,
        batch_size=words.batch_size,
        max_length=words.max_length,
    )
    from lm_eval.utils import make_table

    print(make_table(results))
    if opened.run_dir is not None:
        file = opened.run_dir / "evals" / f"{words.which}-{'+'.join(sorted(results['results']))[:80]}.json"
        write_json(file, _record(opened, words, results))
        logger.path(str(file), "eval")
    return 0


def run_tasks(
    opened: OpenedModel,
    tasks: list[str],
    *,
    limit: int | None = None,
    include_path: str | None = None,
    batch_size: int = 8,
    max_length: int | None = None,
) -> dict[str, Any]:
    """Return what the harness reports for `tasks`, each a name, a group, or a pattern.

    Raises:
        ConfigError: no task of that name, with the nearest one, or a model without a tokenizer.
    """
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    from caramba.benchmark.lm_eval import CarambaLM

    if include_path is not None and not Path(include_path).is_dir():
        raise ConfigError(
            f"eval: --include-path {include_path} is not a folder; name one with task YAML files"
        )
    tokenizer = need_tokenizer(opened, "eval")
    manager = _own_tasks(tasks, include_path) or TaskManager(include_path=include_path)
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown or not tasks:
        name = unknown[0] if unknown else ""
        raise ConfigError(
            f"eval: no task is called {name!r}{nearest(name, manager.all_tasks) or ';'} add a folder of your own with "
            "--include-path"
        )
    adapter = CarambaLM(
        opened.model, tokenizer, max_length=max_length or opened.max_positions, batch_size=batch_size
    )
    results = simple_evaluate(
        model=adapter,
        tasks=manager.match_tasks(tasks),
        task_manager=manager,
        limit=limit,
        log_samples=False,
        bootstrap_iters=BOOTSTRAPS,
    )
    assert results is not None
    return results


def _need_harness() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("eval: lm-evaluation-harness is not installed; pip install 'caramba[eval]'")
    found = tuple(int(part) for part in version("lm_eval").split(".")[:3] if part.isdigit())
    if found < OLDEST:
        raise ConfigError(
            f"eval: lm-evaluation-harness {version('lm_eval')} cannot be imported beside transformers 5; "
            "pip install -U 'caramba[eval]'"
        )


def _own_tasks(tasks: list[str], include_path: str | None) -> Any:
    """Return a manager of the user's folder alone when it has every task: indexing the harness's own takes a while."""
    from lm_eval.tasks import TaskManager

    if include_path is None:
        return None
    manager = TaskManager(include_path=include_path, include_defaults=False)
    return manager if all(manager.match_tasks([task]) for task in tasks) else None


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(prog="caramba eval", add_help=False, allow_abbrev=False)
    parser.add_argument("run")
    parser.add_argument("--tasks", required=True)
    parser.add_argument("--limit", type=_positive)
    parser.add_argument("--include-path")
    parser.add_argument("--which", default="student", choices=("teacher", "student"))
    parser.add_argument("--batch-size", type=_positive, default=8)
    parser.add_argument("--max-length", type=_positive)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--debug", action="store_true")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _record(opened: OpenedModel, words: argparse.Namespace, results: dict[str, Any]) -> dict[str, Any]:
    kept = ("results", "groups", "group_subtasks", "versions", "n-shot", "higher_is_better", "n-samples")
    return {
        "which": words.which,
        "checkpoint": str(opened.path),
        "labels": opened.labels,
        "tokenizer": opened.tokenizer.hash if opened.tokenizer is not None else None,
        "limit": words.limit,
        "max_length": words.max_length or opened.max_positions,
        "lm_eval": version("lm_eval"),
        **{key: _plain(results[key]) for key in kept if key in results},
    }


def _plain(value: Any) -> Any:
    """JSON data: numbers of numpy become Python's, those that are not finite become null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    json.dumps(value)
    return value
