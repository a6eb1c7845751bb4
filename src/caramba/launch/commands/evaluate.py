"""`caramba eval RUN|DIR --tasks A,B`: tasks of lm-evaluation-harness, a local folder, or a suite, on a model."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from caramba.config.benchmark import SUITE_SUFFIXES
from caramba.console import logger
from caramba.errors import ConfigError
from caramba.evaluation.accuracy import log_power, score_local
from caramba.evaluation.custom_suite import count_items, open_suites
from caramba.evaluation.harness import count_documents, item_records, run_harness, task_manager
from caramba.evaluation.local_tasks import TaskScores, group_means, open_tasks
from caramba.infer.model_bundle import ModelBundle, load_model, need_tokenizer
from caramba.launch.commands.arguments import CommandArguments, real
from caramba.runs.files import write_json
from caramba.runtime import choose_device


def main(argv: list[str]) -> int:
    """Run the command and return the exit status.

    Raises:
        ConfigError: the extra is not installed, a wrong argument, an unknown run or task.
    """
    args = _parse(argv)
    logger.quiet = args.quiet
    tasks = [task.strip() for task in args.tasks.split(",") if task.strip()]
    suites = [task for task in tasks if task.endswith(SUITE_SUFFIXES)]
    if suites and len(suites) < len(tasks) and args.eval_data is None:
        raise ConfigError("eval: --tasks mixes suites with tasks of lm-evaluation-harness; call eval once for each")
    if args.eval_data is not None or suites:
        return _evaluate_local(args, [task for task in tasks if task not in suites], suites)
    manager = task_manager(tasks, args.include_path, where="eval", option="--include-path")
    opened = load_model(args.run, role=args.which, device=choose_device(args.device), tokenizer=args.tokenizer)
    log_power(count_documents(tasks, manager, args.limit), args.smallest_difference, "eval")
    results = run_harness(
        opened.model,
        need_tokenizer(opened, "eval"),
        tasks,
        manager,
        max_length=args.max_length or opened.max_positions,
        batch_size=args.batch_size,
        limit=args.limit,
        num_fewshot=args.num_fewshot,
    )
    from lm_eval.utils import make_table

    print(make_table(results))
    kept = ("results", "groups", "group_subtasks", "versions", "n-shot", "higher_is_better", "n-samples")
    found = {key: _plain(results[key]) for key in kept if key in results}
    found["items"] = _harness_items(results)
    _write(opened, args, sorted(results["results"]), {"lm_eval": version("lm_eval"), **found})
    return 0


def _evaluate_local(args: argparse.Namespace, names: list[str], suites: list[str]) -> int:
    if args.num_fewshot is not None or args.include_path is not None:
        raise ConfigError(
            "eval: --num-fewshot and --include-path belong to lm-evaluation-harness; remove them, or "
            f"{'--eval-data' if args.eval_data is not None else 'the suites'}"
        )
    tasks = open_tasks(args.eval_data, names, limit=args.limit, where="eval") if names or not suites else []
    files = open_suites(suites, limit=args.limit, allow_code=args.allow_code, where="eval")
    opened = load_model(args.run, role=args.which, device=choose_device(args.device), tokenizer=args.tokenizer)
    tokenizer = need_tokenizer(opened, "eval")
    counted = [(task.name, len(task.items)) for task in tasks if task.items] + count_items(files)
    log_power(counted, args.smallest_difference, "eval")
    results: list[TaskScores] = []
    for result in score_local(
        *(tasks, files, opened.model, tokenizer),
        max_length=args.max_length or opened.max_positions,
        batch_size=args.batch_size,
        limit=args.limit,
    ):
        _print_scores(result)
        results.append(result)
    means = group_means(results)
    for group, value in means.items():
        print(f"{group:<24} {'mean':<26} {value:.4f}")
    found = {
        result.task: {
            "kind": result.kind,
            "main": result.main,
            "n": result.n,
            "scores": {key: {"value": value, "stderr": error} for key, (value, error) in result.scores.items()},
            "items": result.items,
        }
        for result in results
    }
    used = {file.suite.id: {"path": str(file.path), "sha256": file.sha256} for file in files}
    names = [*(task.name for task in tasks), *used]
    _write(opened, args, names, {"groups": means, "suites": used, "tasks": found})
    return 0


def _print_scores(result: TaskScores) -> None:
    for metric, (value, error) in result.scores.items():
        spread = "" if error is None else f" ± {error:.4f} (standard error)"
        print(f"{result.task:<24} {metric:<26} {value:.4f}{spread}  n={result.n}", flush=True)


def _harness_items(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the score of every document by task and `metric,filter`, where the metric has one for each."""
    found: dict[str, dict[str, Any]] = {}
    for task, scores in results["results"].items():
        for key in scores:
            metric, comma, filter_name = key.partition(",")
            records = item_records(results, task, metric, filter_name) if comma else []
            if records:
                found.setdefault(task, {})[key] = records
    return found


def _write(opened: ModelBundle, args: argparse.Namespace, names: Sequence[str], found: dict[str, Any]) -> None:
    file = Path(args.out).expanduser() if args.out is not None else None
    if file is None and opened.run_dir is not None:
        file = opened.run_dir / "evals" / f"{args.which}-{'+'.join(names)[:80]}.json"
    if file is not None:
        write_json(file, _record(opened, args) | found)
        logger.path(str(file), "eval")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = CommandArguments("eval")
    parser.add_argument("run")
    parser.add_argument("--tasks", required=True)
    parser.add_argument("--limit", type=_positive)
    parser.add_argument("--num-fewshot", type=_natural)
    parser.add_argument("--include-path")
    parser.add_argument("--eval-data")
    parser.add_argument("--allow-code", action="store_true")
    parser.add_argument("--tokenizer")
    parser.add_argument("--out")
    parser.add_argument("--which", default="student", choices=("teacher", "student"))
    parser.add_argument("--batch-size", type=_positive, default=8)
    parser.add_argument("--max-length", type=_positive)
    parser.add_argument("--smallest-difference", type=lambda text: _points(text) / 100)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


_points = real(lambda value: 0 < value <= 100, "{text!r} is not a number of points above 0, at most 100")


def _natural(text: str) -> int:
    return 0 if text == "0" else _positive(text)


def _record(opened: ModelBundle, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "which": args.which,
        "checkpoint": str(opened.path),
        "labels": opened.labels,
        "tokenizer": opened.tokenizer.hash if opened.tokenizer is not None else None,
        "limit": args.limit,
        "num_fewshot": args.num_fewshot,
        "max_length": args.max_length or opened.max_positions,
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
