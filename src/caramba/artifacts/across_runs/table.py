"""The table of a sweep as text, CSV and LaTeX."""

from __future__ import annotations

from collections.abc import Sequence

from caramba.artifacts.across_runs.gather import Gathered
from caramba.artifacts.across_runs.summary import Group, MeanAndDeviation, best_group
from caramba.artifacts.latex import escape, typeset
from caramba.artifacts.tables import NOTHING, mean_text
from caramba.console import align_columns
from caramba.runs import MANIFEST
from caramba.runs.files import csv_text, sha256_of


def spread_text(spread: MeanAndDeviation | None) -> str:
    """Return `mean ± std`, the deviation to the last digit of the mean; a dash where nothing was measured."""
    if spread is None:
        return NOTHING
    return mean_text(spread.mean, spread.std)


def text_table(groups: Sequence[Group], keys: Sequence[str], metrics: Sequence[str], higher: dict[str, bool]) -> str:
    """Return the table with aligned columns; a star marks the best mean of each metric."""
    best = {metric: best_group(groups, metric, is_higher=higher[metric]) for metric in metrics}
    rows = [[*keys, *metrics, "n"]]
    for group in groups:
        cells = [
            spread_text(group.spread(metric)) + (" *" if len(groups) > 1 and best[metric] is group else "")
            for metric in metrics
        ]
        rows.append([*group.values, *cells, _counts(group, metrics)])
    return align_columns(rows)


def runs_csv(found: Gathered, keys: Sequence[str]) -> str:
    """Return one line per run: its directory, state and manifest, its words, and every metric that any run has."""
    metrics = list(dict.fromkeys(key for row in found.rows for key in row.metrics))
    lines: list[list[object]] = [["run", "state", "manifest_sha256", *keys, *metrics]]
    for row in found.rows:
        values = [row.metrics[key].value if key in row.metrics else None for key in metrics]
        digest = sha256_of(row.run / MANIFEST) if row.run is not None else None
        lines.append([row.run, row.state, digest, *map(row.words.get, keys), *values])
    return csv_text(lines)


def summary_csv(groups: Sequence[Group], keys: Sequence[str]) -> str:
    """Return one line per group and metric, with mean, standard deviation and n at full precision."""
    lines: list[list[object]] = [[*keys, "metric", "unit", "mean", "std", "n"]]
    for group in groups:
        units = {key: item.unit for row in group.rows for key, item in row.metrics.items()}
        for metric, unit in units.items():
            spread = group.spread(metric)
            if spread is not None:
                lines.append([*group.values, metric, unit, spread.mean, spread.std, spread.n])
    return csv_text(lines)


def latex_table(
    found: Gathered,
    groups: Sequence[Group],
    keys: Sequence[str],
    metrics: Sequence[str],
    higher: dict[str, bool],
) -> str:
    """Return a booktabs table, the best mean of each metric in bold; each line ends with the runs behind it."""
    best = {metric: best_group(groups, metric, is_higher=higher[metric]) for metric in metrics}
    is_unfinished = len(found.finished) < len(found.rows)
    note = f" {len(found.finished)} of {len(found.rows)} runs have finished." if is_unfinished else ""
    note += f" Proxy teacher: {escape(found.labels['proxy'])}." if found.labels else ""
    signs = {True: r" $\uparrow$", False: r" $\downarrow$"}
    heads = [escape(metric) + signs[higher[metric]] for metric in metrics]
    lines = [
        f"% Sweep {found.title}. Needs \\usepackage{{booktabs}}.",
        "% Each row ends with the runs of its numbers, as run id = the first digits of its manifest's SHA-256.",
        r"\begin{table}[t]",
        r"  \centering",
        rf"  \caption{{Sweep \texttt{{{escape(found.title)}}}: mean $\pm$ standard deviation over $n$ runs.{note}}}",
        r"  \label{tab:caramba-sweep}",
        rf"  \begin{{tabular}}{{{'l' * len(keys)}{'r' * (len(metrics) + 1)}}}",
        r"    \toprule",
        "    " + " & ".join([*map(escape, keys), *heads, "$n$"]) + r" \\",
        r"    \midrule",
    ]
    for group in groups:
        cells = [_typeset(spread_text(group.spread(metric))) for metric in metrics]
        cells = [
            rf"\textbf{{{cell}}}" if best[metric] is group and len(groups) > 1 else cell
            for metric, cell in zip(metrics, cells, strict=True)
        ]
        runs = " ".join(
            f"{row.run.name}={sha256_of(row.run / MANIFEST)[:8]}" for row in group.rows if row.run is not None
        )
        line = " & ".join([*(escape(value) for value in group.values), *cells, _counts(group, metrics)])
        lines.append(rf"    {line} \\ % {runs}")
    return "\n".join([*lines, r"    \bottomrule", r"  \end{tabular}", r"\end{table}", ""])


def _typeset(text: str) -> str:
    return "--" if text == NOTHING else typeset(text)


def _counts(group: Group, metrics: Sequence[str]) -> str:
    """Return how many runs are behind a row; a range when its metrics differ in that."""
    counts = {spread.n for metric in metrics if (spread := group.spread(metric)) is not None} or {0}
    return str(max(counts)) if len(counts) == 1 else f"{min(counts)}-{max(counts)}"
