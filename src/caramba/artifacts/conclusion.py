"""What a run came to, in one sentence whose numbers are all keys of its report."""

from __future__ import annotations

from caramba.artifacts.key import parse_key
from caramba.artifacts.metrics import STUDENT, TEACHER, headline
from caramba.artifacts.summary import ratio_key
from caramba.artifacts.tables import Cell, number
from caramba.result import Metric, RunResult

Z_95 = 1.959964


def conclude(result: RunResult, metrics: dict[str, Metric]) -> list[Cell]:
    """Return the sentence as pieces of text; those with a key are numbers of the report.

    With a teacher it is about the ratio of perplexities and of cache bytes, else about the model alone; of a run
    without benchmarks about its last loss.
    """
    perplexity = headline(metrics, "perplexity", "perplexity")
    student, teacher = perplexity.get(STUDENT), perplexity.get(TEACHER)
    if student is not None and teacher is not None:
        return _against_teacher(student, metrics)
    alone = student or (next(iter(perplexity.values())) if perplexity else None)
    if alone is not None:
        name = "teacher" if parse_key(alone.key).model == TEACHER else "model"
        return [
            Cell(f"The {name} has a held-out perplexity of "),
            _value(alone),
            *_interval(alone),
            Cell("."),
        ]
    trained = [(index, phase) for index, phase in enumerate(result.phases) if phase.loss is not None]
    if not trained:
        return [Cell("Nothing was measured: no phase trained and no benchmark finished.")]
    index, phase = trained[-1]
    field, kind = ("loss", "training") if phase.val_loss is None else ("val_loss", "held-out")
    return [
        Cell(f"The last phase, {phase.id}, ended at a {kind} loss of "),
        Cell(number(float(getattr(phase, field) or 0.0)), f"phases[{index}].{field}", is_number=True),
        Cell(" after "),
        Cell(number(phase.tokens), f"phases[{index}].tokens", is_number=True),
        Cell(" tokens; no perplexity benchmark finished."),
    ]


def _against_teacher(student: Metric, metrics: dict[str, Metric]) -> list[Cell]:
    ratio = metrics.get(ratio_key("perplexity", student))
    if ratio is None:
        return [
            Cell("The student has a held-out perplexity of "),
            _value(student),
            *_interval(student),
            Cell("."),
        ]
    pieces = [Cell("The student has "), _value(ratio), Cell(" times the perplexity of its teacher")]
    pieces += _interval(ratio)
    cached = headline(metrics, "memory", "kv_bytes_per_token").get(STUDENT)
    fewer = metrics.get(ratio_key("kv_bytes_per_token", cached)) if cached is not None else None
    if fewer is not None:
        pieces += [Cell(" and "), _value(fewer), Cell(" times its cache bytes per token")]
    return [*pieces, Cell(".")]


def _value(metric: Metric) -> Cell:
    return Cell(number(metric.value), metric.key, is_number=True)


def _interval(metric: Metric) -> list[Cell]:
    """Return the 95% interval of a metric that has a standard error."""
    error = metric.standard_error
    if not error:
        return []
    low, high = metric.value - Z_95 * error, metric.value + Z_95 * error
    return [Cell(f" (95% interval {number(low)} to {number(high)})")]
