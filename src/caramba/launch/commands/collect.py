"""`caramba collect SWEEP|DIR`: one table over the runs of a sweep, running or finished."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from caramba.artifacts.across_runs.gather import Gathered, gather, swept_keys, with_manifest_keys
from caramba.artifacts.across_runs.plot import draw_sweep
from caramba.artifacts.across_runs.summary import (
    Group,
    best_group,
    choose_keys,
    choose_metrics,
    group_rows,
    prefers_higher,
)
from caramba.artifacts.across_runs.table import latex_table, runs_csv, spread_text, summary_csv, text_table
from caramba.console import print_stderr
from caramba.errors import ConfigError
from caramba.launch.commands.arguments import CommandArguments
from caramba.runs.files import write_whole

RUNS_CSV, SUMMARY_CSV, TABLE, PLOT = "runs.csv", "summary.csv", "table.tex", "plot.png"


def main(argv: list[str]) -> int:
    """Print mean, standard deviation and n over seeds, and write what the options ask for.

    Raises:
        ConfigError: nothing is there, or a metric or key that no run has.
    """
    parser = CommandArguments("collect")
    parser.add_argument("sweep")
    parser.add_argument("--metric", action="append", default=[])
    parser.add_argument("--by", default="")
    parser.add_argument("--best", choices=("min", "max"))
    parser.add_argument("--csv", action="store_true")
    parser.add_argument("--tex", action="store_true")
    parser.add_argument("--plot", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    found = gather(args.sweep)
    asked = [key for key in args.by.split(",") if key]
    found = replace(found, rows=with_manifest_keys(found.rows, asked))
    keys = choose_keys(found.rows, asked)
    print(_headline(found))
    for row in found.rows:
        if row.problem:
            print_stderr(f"collect: {row.run}: omitted: {row.problem}")
    if not found.finished:
        if args.csv or args.tex or args.plot or args.metric:
            raise ConfigError(f"collect: no run of {found.title} has finished, so there is no number to write yet")
        return 0
    metrics = choose_metrics(found.finished, args.metric)
    groups = group_rows(found.finished, keys)
    higher = {key: prefers_higher(key) if args.best is None else args.best == "max" for key in metrics}
    if metrics and not args.quiet:
        print(text_table(groups, keys, metrics, higher))
        if any(spread.std is not None for spread in (g.spread(m) for g in groups for m in metrics) if spread):
            print("± is the standard deviation over n runs")
    for metric in metrics:
        best = best_group(groups, metric, is_higher=higher[metric])
        if best is not None and len(groups) > 1:
            values = ", ".join(f"{key}={value}" for key, value in zip(keys, best.values, strict=True))
            runs = " ".join(row.name for row in best.rows)
            print(f"best {metric}: {spread_text(best.spread(metric))} at {values} ({runs})")
    out = (args.out or found.folder / "collected").absolute()
    contents: dict[str, str | bytes] = {}
    if args.csv:
        contents[RUNS_CSV] = runs_csv(found, swept_keys(found.rows))
        contents[SUMMARY_CSV] = summary_csv(groups, keys)
    if args.tex:
        contents[TABLE] = latex_table(found, groups, keys, metrics, higher)
    if args.plot:
        contents[PLOT] = _figure(found, groups, keys, metrics, higher)
    for name, content in contents.items():
        write_whole(out / name, content)
        print(f"wrote {out / name}")
    return 0


def _headline(found: Gathered) -> str:
    states = [row.state for row in found.rows]
    rest = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states) if state != "finished")
    proxy = f"; proxy teacher: {found.labels['proxy']}" if found.labels else ""
    return f"{found.title}: {len(found.finished)} of {len(states)} runs finished" + (
        f" ({rest}){proxy}" if rest else proxy
    )


def _figure(
    found: Gathered, groups: list[Group], keys: list[str], metrics: list[str], higher: dict[str, bool]
) -> bytes:
    if not metrics:
        raise ConfigError("collect: --plot: the runs measured nothing; benchmark=quick measures")
    drawn = draw_sweep(groups, keys, metrics[0], found.title, is_higher=higher[metrics[0]], labels=found.labels)
    if drawn is None:
        raise ConfigError(
            "collect: --plot: the runs differ in no key but seeds; name one with --by, or leave out --plot"
        )
    return drawn
