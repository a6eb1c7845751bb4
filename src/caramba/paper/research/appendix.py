"""What a loop's ledger adds to the evidence of a paper: results of its comparisons, and a list of every run."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from caramba.artifacts.latex import escape, typeset
from caramba.artifacts.tables import number
from caramba.paper.evidence import Evidence, Result
from caramba.paper.research.experiment import run_place
from caramba.paper.research.ledger import LEDGER


def with_experiments(evidence: Evidence, events: Sequence[Mapping[str, Any]], metric: str) -> Evidence:
    """Return the evidence with `research.NAME.baseline|candidate|e_value` of every decision, and the appendix."""
    runs = [line for line in events if line["event"] in ("trial", "run", "held_out_run")]
    if not runs:
        return evidence
    results = dict(evidence.results)
    unit, is_proxy = results[metric].unit, results[metric].is_proxy
    decided = [line for line in events if line["event"] == "decision"]
    for decision in decided:
        name, n = decision["proposal"], decision["n_seeds"]
        tuned = next((line for line in events if line["event"] == "tuned" and line["proposal"] == name), {})
        for arm in ("baseline", "candidate"):
            place = run_place(name, arm, 0, tuned.get(arm, 0)).parent.as_posix()
            values = [line["metric"] for line in runs if line["place"].startswith(f"{place}/seed")]
            values = [float(value) for value in values[:n] if value is not None]
            if values:
                spread = statistics.stdev(values) if len(values) > 1 else None
                key = f"research.{name}.{arm}"
                results[key] = Result(
                    key, statistics.fmean(values), unit, len(values), spread, LEDGER, is_proxy=is_proxy
                )
        looks = [line for line in events if line["event"] == "look" and line["proposal"] == name]
        key = f"research.{name}.e_value"
        results[key] = Result(key, looks[-1]["e_value"], "", n, None, LEDGER)
    for line in runs:
        if line["event"] == "held_out_run" and line["metric"] is not None:
            key = f"research.held_out.{line['arm']}"
            results[key] = Result(key, line["metric"], unit, 1, None, LEDGER, is_proxy=is_proxy)
    names = (*evidence.names, *(line["proposal"] for line in decided))
    return dataclasses.replace(
        evidence, results=results, names=names, appendix=_appendix(runs, decided, metric, evidence)
    )


def _appendix(
    runs: Sequence[Mapping[str, Any]], decided: Sequence[Mapping[str, Any]], metric: str, evidence: Evidence
) -> str:
    title = r"\section*{Every run of the research loop}"
    told = "; ".join(
        rf"\texttt{{{escape(line['proposal'])}}}: {line['state']} after {line['n_seeds']} seeds" for line in decided
    )
    lines = [title, rf"{{\small\noindent Metric: \texttt{{{escape(metric)}}}. {told}.\par", ""]
    for line in runs:
        value = "failed" if line["metric"] is None else typeset(number(line["metric"]))
        place = escape(line["place"].removeprefix("experiments/"))
        lines += [rf"\noindent\texttt{{{place}}}: {value}, {typeset(number(line['tokens']))} tokens\par"]
    return "\n".join([*lines, "}"])
