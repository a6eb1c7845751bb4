"""`caramba compare A B…`: what differs between runs, in the manifest, in numbers, item by item and over time.

They are runs, or JSON files of `caramba eval`, of which two can be compared, and only
their items.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from caramba.artifacts.across_runs.compare import (
    column_letter,
    compare_models,
    compare_with_first,
    draw_curves,
    format_comparisons,
    format_differing,
    format_metrics,
    format_paired,
    interval_text,
    manifest_differences,
    metric_differences,
)
from caramba.artifacts.across_runs.gather import check_readable, read_labels, read_metrics
from caramba.artifacts.tables import number
from caramba.console import align_columns
from caramba.errors import ConfigError
from caramba.launch.commands.arguments import CommandArguments
from caramba.runs import MANIFEST, resolve_run
from caramba.runs.files import write_whole
from caramba.runs.state import run_state

# Of more metrics than this only the clear differences are printed; --metric shows any.
_MOST = 40


def main(argv: list[str]) -> int:
    """Print the differences and write the curves as a PNG. Of more than two runs, each is tested against the first.

    Raises:
        ConfigError: a run that is not there, the same run twice, or a metric that they do not share.
    """
    parser = CommandArguments("compare")
    parser.add_argument("first")
    parser.add_argument("second")
    parser.add_argument("others", nargs="*")
    parser.add_argument("--metric", action="append", default=[])
    parser.add_argument("--models", default="student,student")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    models = _models(args.models)
    if args.others:
        return _compare_many([args.first, args.second, *args.others], models, args)
    files = [Path(text) for text in (args.first, args.second) if Path(text).suffix == ".json"]
    if files and not any(file.name == MANIFEST for file in files):
        comparisons = compare_models(_source(args.first), _source(args.second), models, args.metric)
        if not comparisons:
            raise ConfigError(
                f"compare: {args.first} and {args.second} share no items of a task; evaluate both on the same tasks"
            )
        print(format_comparisons(comparisons))
        return 0
    first, second = resolve_run(args.first), resolve_run(args.second)
    if first == second and models[0] != models[1]:
        comparisons = compare_models(first, second, models, args.metric)
        if not comparisons:
            raise ConfigError(
                f"compare: {args.first} has no items of both {models[0]} and {models[1]}; an accuracy benchmark keeps "
                "them"
            )
        print(f"A  {models[0]}\nB  {models[1]}\n{format_comparisons(comparisons)}")
        return 0
    if first == second:
        raise ConfigError(
            f"compare: {args.first} and {args.second} are the same run; name two, or --models teacher,student"
        )
    for run in (first, second):
        check_readable(run)
    for letter, run in (("A", first), ("B", second)):
        state = run_state(run)
        where = f", {state.phase} step {state.step}/{state.steps}" if state.phase else ""
        proxy = read_labels(run).get("proxy")
        print(f"{letter}  {state.name}  {state.state}{where}" + (f"; proxy teacher: {proxy}" if proxy else ""))
    changed = manifest_differences(first, second)
    print(f"\nmanifest, A -> B: {len(changed) or 'no'} differences")
    for line in changed:
        print(f"  {line}")
    _print_metrics(first, second, args.metric)
    comparisons = compare_models(first, second, models, args.metric)
    if comparisons:
        print(f"\n{format_comparisons(comparisons)}")
    return _draw((first, second), args.out or Path(f"compare-{first.name}-{second.name}.png"), "neither run has")


def _draw(runs: Sequence[Path], out: Path, nobody: str) -> int:
    """Write the curves of runs, or say that none of them has trained."""
    figure = draw_curves(runs)
    if figure is None:
        print(f"\n{nobody} trained yet, so there are no curves")
    else:
        write_whole(out.absolute(), figure)
        print(f"\nwrote {out}")
    return 0


def _compare_many(names: Sequence[str], models: tuple[str, str], args: argparse.Namespace) -> int:
    """Print what differs between more than two runs."""
    if models[0] != models[1]:
        raise ConfigError(
            f"compare: --models {args.models} names two models for {len(names)} runs; name one model twice, as "
            "student,student, or give two runs"
        )
    if any(name.endswith(".json") and Path(name).name != MANIFEST for name in names):
        raise ConfigError("compare: files of caramba eval are compared two at a time; give two, or runs")
    runs = [resolve_run(name) for name in names]
    for index, run in enumerate(runs):
        if run in runs[:index]:
            raise ConfigError(f"compare: {names[index]} is {runs[index].name}, which is named twice; name each once")
    for run in runs:
        check_readable(run)
    for index, run in enumerate(runs):
        state = run_state(run)
        print(f"{column_letter(index)}  {state.name}  {state.state}")
    print(f"\n{format_differing(runs)}")
    metrics = format_metrics([read_metrics(run) for run in runs], args.metric, _MOST)
    if args.metric and not metrics:
        raise ConfigError(
            f"compare: --metric {' '.join(args.metric)}: no metric with that in its key is in two reports"
        )
    print(f"\n{metrics}" if metrics else "\nno metrics in two of them: a run has its report once it has finished")
    paired = compare_with_first(runs, models[0], args.metric)
    if paired:
        print(f"\n{format_paired(paired)}")
    out = args.out or Path(f"compare-{runs[0].name}-and-{len(runs) - 1}-more.png")
    return _draw(runs, out, "none of them has")


def _models(text: str) -> tuple[str, str]:
    names = [name.strip() for name in text.split(",")]
    if len(names) != 2 or not all(names):
        raise ConfigError(f"compare: --models {text!r}: expected two names, as teacher,student")
    return names[0], names[1]


def _source(text: str) -> Path:
    """Return a file of `caramba eval`, or a run."""
    file = Path(text).expanduser()
    return file if file.suffix == ".json" and file.name != MANIFEST else resolve_run(text)


def _print_metrics(first: Path, second: Path, texts: list[str]) -> None:
    found = metric_differences(first, second, texts)
    if texts and not found:
        raise ConfigError(f"compare: --metric {' '.join(texts)}: no metric with that in its key is in both reports")
    if not found:
        print("\nno metrics in both: a run has its report once it has finished")
        return
    shown = (
        found if texts or len(found) <= _MOST else [item for item in found if item.is_clear or item.half_width is None]
    )
    print("\nmetrics with 95% intervals where the reports have them; * the interval of the difference leaves out 0")
    rows = [("", "A", "B", "B - A")]
    for item in shown[: None if texts else _MOST]:
        interval = f" ± {number(item.half_width)}" if item.half_width else ""
        star = " *" if item.is_clear and item.half_width else ""
        cells = (interval_text(item.key, item.first), interval_text(item.key, item.second))
        rows.append((item.key, *cells, f"{number(item.value)}{interval}{star}"))
    print(align_columns(rows, "  "))
    if len(rows) - 1 < len(found):
        print(f"  … {len(found) - len(rows) + 1} more: --metric TEXT shows those with TEXT in their key")
