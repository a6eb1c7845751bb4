"""The tables of a run as plain text, each number with its metric key; `latex` and `page` write them out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from caramba.artifacts.key import Condition, MetricKey, parse_key
from caramba.artifacts.ladder import TRAINING_HEAD, ladder_keys
from caramba.artifacts.metrics import STUDENT, TEACHER, describe, describe_dispersion, headline, verdict_keys
from caramba.artifacts.optimizers import OPTIMIZERS_HEAD, interval_cells, optimizer_rows
from caramba.artifacts.recall import list_recall
from caramba.artifacts.rows import collect_measured_rows, collect_verdicts
from caramba.artifacts.style import byte_text, name_of
from caramba.artifacts.summary import ratio_key, stage_bars
from caramba.result import Metric, RunResult

NOTHING, TIMES = "\u2013", "\u00d7"
LONGEST_ANSWER = 24


@dataclass(frozen=True)
class Cell:
    """The text of a table cell, and the metric key of the number in it.

    A number's text is written as `number` writes it, with TIMES, `≤ ≥ ±` and an exponent as `1.5e-05`.
    """

    text: str
    key: str | None = None
    is_number: bool = False
    is_code: bool = False
    is_bold: bool = False


@dataclass(frozen=True)
class Table:
    """A table: its caption is `before`, the run's name and `after`, and columns of WORDS stand left, others right."""

    label: str
    before: str
    name: str
    after: str
    head: tuple[str, ...]
    rows: list[list[Cell]]


def _windows(result: RunResult) -> str:
    """Name the windows of the perplexity benchmarks: short ones hide what is far back."""
    sizes = {
        row["block_size"]
        for bench in result.benchmarks
        if bench.type == "perplexity"
        for row in bench.rows
        if "block_size" in row
    }
    shown = " and ".join(f"{size:,}" for size in sorted(sizes))
    return f" Perplexity in windows of {shown} tokens." if sizes else ""


def list_tables(result: RunResult, metrics: dict[str, Metric]) -> list[Table]:
    """Return the tables that have rows, in the order in which they are read."""
    note = f" Proxy teacher: {result.labels['proxy']}." if "proxy" in result.labels else ""
    where, windows = _conditions(metrics), _windows(result)
    same = " on the same held-out windows."
    held_out, against = " from the same teacher" + same, " against 16 bits" + same
    listed = [
        (
            "comparison",
            "Teacher and student of ",
            f".{where}{windows}",
            COMPARISON_HEAD,
            _comparison(metrics),
        ),
        ("stages", "Held-out perplexity of ", f" by stage.{windows}", STAGE_HEAD, _stages(metrics)),
        ("controls", "Controls of ", held_out, CONTROL_HEAD, _controls(result, metrics)),
        ("weights", "Quantised weights of ", against, WEIGHTS_HEAD, _weights(result, metrics)),
        ("ladder", "Inference ladder of ", ", decode alone.", LADDER_HEAD, _ladder(result, metrics)),
        ("training_ladder", "Training ladder of ", ".", TRAINING_HEAD, _training_ladder(result, metrics)),
        ("optimizers", "Optimisers of ", ", from scratch.", OPTIMIZERS_HEAD, _optimizers(result, metrics)),
        ("variants", "Attentions of ", " from scratch.", VARIANT_HEAD, _variants(result, metrics)),
        ("recall", "Recall behind the window, attention of ", ".", RECALL_HEAD, _recall(metrics)),
        ("contexts", "Recall in long contexts, attention of ", ".", CONTEXT_HEAD, _contexts(metrics)),
        ("depths", "Keys found in held-out text by depth, of ", ".", DEPTH_HEAD, _depths(metrics)),
        ("accuracy", "Accuracy of ", " by task.", ACCURACY_HEAD, _accuracy(metrics)),
        ("generation", "Generated text of ", ".", GENERATION_HEAD, _generation(metrics)),
        ("throughput", "Training speed of ", " by phase.", SPEED_HEAD, _speed(result)),
        ("transplant", "Surgery of ", ", by attention layer.", TRANSPLANT_HEAD, _transplant(result)),
        ("verification", "Verification of ", ".", VERIFY_HEAD, _verification(result)),
        ("cases", "Cases of ", ", correct answers in bold.", CASE_HEAD, _cases(result)),
    ]
    tables = [
        Table(label, before, result.name, after + _spread_note(rows, metrics) + note, head, rows)
        for label, before, after, head, rows in listed
        if rows
    ]
    return tables if has_teacher(result, metrics) else [_without_teacher(table) for table in tables]


def has_teacher(result: RunResult, metrics: dict[str, Metric]) -> bool:
    """Whether a run has a teacher: without one its only model is no student."""
    roles = {phase.trains for phase in result.phases} | {parse_key(key).model for key in metrics}
    answers = {answer.model for _, case in collect_verdicts(result) for answer in case.answers}
    return TEACHER in roles | answers or result.transplant is not None


_OF_TEACHER = frozenset({"Teacher", "Change", "Ratio to teacher", "Teacher answers"})


def _without_teacher(table: Table) -> Table:
    """Leave out the columns that need a teacher, and call the student the model."""
    kept = [index for index, name in enumerate(table.head) if name not in _OF_TEACHER]
    rows = [[row[index] for index in kept] for row in table.rows]
    rows = [[replace(cell, text="Model") if cell.text == "Student" else cell for cell in row] for row in rows]
    head = tuple(table.head[index].replace("Student", "Model") for index in kept)
    before = "Model of " if table.label == "comparison" else table.before
    return replace(table, before=before, head=head, rows=rows)


def _spread_note(rows: list[list[Cell]], metrics: dict[str, Metric]) -> str:
    """Return what ± is in these rows; empty where no cell has one."""
    keys = [cell.key for row in rows for cell in row if cell.key is not None and "±" in cell.text]
    return describe_dispersion(metrics[key] for key in keys if key in metrics)


COMPARISON_HEAD = ("Metric", "Teacher", "Student", "Change")
STAGE_HEAD = ("Stage", "Perplexity", "Ratio to teacher")
ACCURACY_HEAD = ("Task", "Metric", "Teacher", "Student", "Change")
GENERATION_HEAD = ("Metric", "Teacher", "Student")
SPEED_HEAD = ("Phase", "Tokens/s", "MFU (share)", "Data wait (share)", "Peak memory", "Reserved")
VARIANT_HEAD = ("Model", "Parameters", "Perplexity", "Bits per byte", "Bytes per token")
CONTROL_HEAD = ("Model", "Tokens", "Bytes per token", "KV ratio", "PPL ratio", "KL", "Top-1")
WEIGHTS_HEAD = ("Model", "Weights", "Perplexity", "NLL change (nats)", "PPL ratio", "Bytes", "Smaller")
RECALL_HEAD = ("Model", "Attention", "Slots", "Pairs", "Cache", "Recall", "Own, swapped", "Other, swapped")
CONTEXT_HEAD = (
    "Model",
    "Tokens",
    "Ratio",
    "Full cache",
    "Recall, full",
    "Window",
    "Slots",
    "Cache",
    "Recall",
)
DEPTHS = (10, 30, 50, 70, 90)
DEPTH_HEAD = ("Model", "Task", "Tokens", *(f"{depth}%" for depth in DEPTHS))
LADDER_HEAD = ("Model", "Rung", "Ran as", "Per token (ms)", "Tokens/s", "Speed-up")
CASE_HEAD = ("Case", "Kind", "Expected", "Teacher answers", "Student answers")
# Columns of words stand left, numbers right.
WORDS = frozenset(
    {*CASE_HEAD, "Metric", "Model", "Stage", "Phase", "Task", "Type", "Check", "Result", "Rung", "Row"}
    | {"Ran as", "Weights", "Model answers", "Attention"}
)
TRANSPLANT_HEAD = ("Layer", "Cached", "KV ratio", "Energy kept", "Block error", "Frequencies")
VERIFY_HEAD = ("Type", "Check", "Value", "Bound", "Result")

MOST, LEAST = "≤", "≥"
DOWN, UP = " ↓", " ↑"
# Fields of the family generation.
_GENERATED = {
    "repetition": "Repeated 4-grams, share" + DOWN,
    "distinct_1": "Distinct tokens, share",
    "distinct_2": "Distinct pairs of tokens, share",
    "length": "Length, tokens",
    "win_rate": "Wins against the teacher, share" + UP,
    "win_tie_rate": "Wins and ties, share" + UP,
}
# Family, field, words, direction that is better, unit.
_COMPARED = (
    ("perplexity", "perplexity", "Perplexity", DOWN, ""),
    ("perplexity", "bits_per_byte", "Bits per byte", DOWN, ""),
    ("accuracy", "mean", "Accuracy, mean over tasks", UP, ""),
    ("latency", "tok_s", "Throughput", UP, "tokens/s"),
    ("memory", "kv_bytes_per_token", "KV cache per token", DOWN, "bytes"),
    ("memory", "model_bytes", "Model size", "", ""),
)


def number(value: float) -> str:
    """Return a number with four significant digits, whole ones in full, with separated thousands."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3e}"
    digits = max(0, 3 - len(str(int(abs(value)))) + 1) if abs(value) >= 1 else 4
    return f"{value:,.{digits}f}"


def _comparison(metrics: dict[str, Metric]) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    for family, field, words, arrow, unit in _COMPARED:
        found = headline(metrics, family, field)
        pair = [found.get(TEACHER), found.get(STUDENT)]
        any_metric = pair[0] or pair[1]
        if any_metric is None:
            continue
        label = Cell(words + arrow + (f" ({unit})" if unit else ""))
        show = _bytes_cell if field == "model_bytes" else _measured_cell
        change = metrics.get(ratio_key(field, any_metric)) if all(pair) else None
        rows.append([label, *(show(metric) for metric in pair), _ratio_cell(change)])
    return rows


def _conditions(metrics: dict[str, Metric]) -> str:
    """Say under which conditions the rows of the comparison were measured; the weights are the same under all."""
    notes: list[str] = []
    for family, field, words, _, _ in _COMPARED:
        found = headline(metrics, family, field)
        conditions = dict(parse_key(next(iter(found.values())).key).conditions) if found else {}
        if conditions and field != "model_bytes":
            notes.append(f" {words}: {describe(conditions)}.")
    return "".join(notes)


def _stages(metrics: dict[str, Metric]) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    for model, metric in stage_bars(metrics):
        conditions = dict(parse_key(metric.key).conditions)
        where = conditions if model == STUDENT else {"model": model, **conditions}
        ratio = metrics.get(MetricKey("ratio", None, "perplexity", where).format())
        rows.append([Cell(name_of(model)), _measured_cell(metric), _ratio_cell(ratio)])
    return rows


def _transplant(result: RunResult) -> list[list[Cell]]:
    """List what surgery kept of each converted layer; the error is the block output's, held out, relative RMS."""
    rows: list[list[Cell]] = []
    for index, layer in enumerate(result.transplant.layers if result.transplant is not None else ()):
        path = f"transplant.layers[{index}]"
        ratio = Cell(f"{layer.teacher_cached / layer.cached:.2f}{TIMES}", f"{path}.cached", is_number=True)
        cached, *others = (
            number_cell(getattr(layer, name), f"{path}.{name}")
            for name in ("cached", "energy_kept", "error", "frequencies")
        )
        rows.append([Cell(str(index)), cached, ratio, *others])
    return rows


def _verification(result: RunResult) -> list[list[Cell]]:
    """List every check but those of single layers, which are no thresholds and stay in report.json."""
    rows: list[list[Cell]] = []
    for verdict, keys in zip(result.verdicts, verdict_keys(result.verdicts), strict=True):
        for check, key in zip(verdict.checks, keys, strict=True):
            if check.bound is None and re.search(r"_layer\d+$", check.name):
                continue
            name = check.name + (f" ({check.unit})" if check.unit not in ("", "ratio") else "")
            sign = LEAST if check.is_minimum else MOST
            bound = number_cell(check.bound, f"{key}#bound", lambda value, sign=sign: f"{sign} {number(value)}")
            outcome = "recorded" if check.bound is None else "passed" if check.passed else "failed"
            last = Cell(outcome, is_bold=not check.passed)
            rows.append([Cell(verdict.type), Cell(name), number_cell(check.value, key), bound, last])
    return rows


def _controls(result: RunResult, metrics: dict[str, Metric]) -> list[list[Cell]]:
    """List what was compared, with the tokens that each trained on after the teacher."""
    shows = {"tokens": _measured_cell, "kv_bytes_per_token": _measured_cell, "kv_ratio": _ratio_cell}
    shows |= {"ppl_ratio": _ratio_cell, "kl": _measured_cell, "top1": _measured_cell}
    return [
        [Cell(name_of(row["model"])), *_fields(metrics, MetricKey("controls", row["model"], "tokens"), shows)]
        for row in collect_measured_rows(result, "controls")
    ]


def _fields(metrics: dict[str, Metric], key: MetricKey, shows: dict[str, ShowMetric]) -> list[Cell]:
    """Return the cells of several fields of the family, model and conditions of a key."""
    return [show(metrics.get(replace(key, field=field).format())) for field, show in shows.items()]


def _weights(result: RunResult, metrics: dict[str, Metric]) -> list[list[Cell]]:
    """List what every format of weights costs and saves; the first row of a model is its 16 bits."""
    shows = {"perplexity": _measured_cell, "delta_nll": _measured_cell, "ppl_ratio": _ratio_cell}
    shows |= {"weight_bytes": _bytes_cell, "bytes_ratio": _ratio_cell}
    rows: list[list[Cell]] = []
    for row in collect_measured_rows(result, "weights"):
        model, weights = row["model"], str(row["weights"])
        key = MetricKey("weights", model, "perplexity", {"weights": weights})
        rows.append([Cell(name_of(model)), Cell(weights), *_fields(metrics, key, shows)])
    return rows


def _recall(metrics: dict[str, Metric]) -> list[list[Cell]]:
    """List every trained attention; a swap gives a row the slots of another one."""
    rows: list[list[Cell]] = []
    for model, where, found in list_recall(metrics, has_length=False):
        words = [name_of(model), str(where["attention"]).replace("_", " ")]
        sizes = [str(where.get("slots", NOTHING)), str(where["pairs"])]
        shares = [_measured_cell(found.get(name)) for name in ("recall", "swapped_own", "swapped_other")]
        rows.append([*map(Cell, (*words, *sizes)), _bytes_cell(found["cache_bytes"]), *shares])
    return rows


def _contexts(metrics: dict[str, Metric]) -> list[list[Cell]]:
    """List every length and ratio of tokens to window and slots, next to full attention of that length."""
    listed = list_recall(metrics, has_length=True)
    full = {(model, where["length"]): found for model, where, found in listed if where["attention"] == "full"}
    rows: list[list[Cell]] = []
    for model, where, found in listed:
        if where["attention"] == "memory":
            whole = full.get((model, where["length"]), {})
            sizes = [f"{where['length']:,}", f"{where['ratio']}{TIMES}"]
            rows.append(
                [
                    *map(Cell, (name_of(model), *sizes)),
                    _bytes_cell(whole.get("cache_bytes")),
                    _measured_cell(whole.get("recall")),
                    *(Cell(f"{where[name]:,}") for name in ("window", "slots")),
                    _bytes_cell(found["cache_bytes"]),
                    _measured_cell(found["recall"]),
                ]
            )
    return rows


def _depths(metrics: dict[str, Metric]) -> list[list[Cell]]:
    """List needles and keys that were found, by length and depth."""
    found: dict[tuple[str, str, int], dict[Condition, Metric]] = {}
    for metric in metrics.values():
        key = parse_key(metric.key)
        if key.family == "long_context" and key.field in ("needle", "recall") and "depth" in key.conditions:
            at = (str(key.model), key.field, int(key.conditions["length"]))
            found.setdefault(at, {})[key.conditions["depth"]] = metric
    return [
        [
            *map(Cell, (name_of(model), task, f"{length:,}")),
            *(_measured_cell(row.get(depth)) for depth in DEPTHS),
        ]
        for (model, task, length), row in found.items()
    ]


def _ladder(result: RunResult, metrics: dict[str, Metric]) -> list[list[Cell]]:
    """List the rungs of inference ladders that were climbed."""
    found = {
        (key.model, key.conditions.get("rung"), key.field, metric.source): metric
        for key, metric in ((parse_key(text), metric) for text, metric in metrics.items())
        if key.family == "inference_ladder"
    }
    rows: list[list[Cell]] = []
    for bench in result.benchmarks:
        for row in bench.rows if bench.type == "inference_ladder" else ():
            if row.get("skipped") is None:
                at = [found.get((row["model"], row["rung"], field, bench.id)) for field in ("latency_ms", "tok_s")]
                words = [Cell(name_of(row["model"])), Cell(str(row["what"])), Cell(str(row["ran"]))]
                rows.append([*words, *map(_measured_cell, at), Cell(f"{row['speed_up']:.2f}{TIMES}")])
    return rows


def _training_ladder(result: RunResult, metrics: dict[str, Metric]) -> list[list[Cell]]:
    """List the rows of training ladders that were measured, those at one batch with their own largest."""
    shows = (_measured_cell, _ratio_cell, _bytes_cell, *(_measured_cell,) * 4)
    return [
        [
            *map(Cell, words),
            *(show(metrics.get(key)) for show, key in zip(shows, keys, strict=True)),
            Cell(ended or NOTHING),
        ]
        for words, keys, ended in ladder_keys(result)
    ]


def _optimizers(result: RunResult, metrics: dict[str, Metric]) -> list[list[Cell]]:
    """List the optimisers of a table, with intervals of the differences from AdamW."""
    return [
        [
            Cell(str(row["row"])),
            *(_measured_cell(metrics.get(key)) for key in keys[:3]),
            *map(Cell, interval_cells(row)),
            _measured_cell(metrics.get(keys[3])),
            Cell(f"{row['trial_tokens']:,}"),
        ]
        for row, keys in optimizer_rows(result)
    ]


def _variants(result: RunResult, metrics: dict[str, Metric]) -> list[list[Cell]]:
    """List the runs with `exp`; bytes are those counted from cache tensors."""
    columns = [
        headline(metrics, family, field)
        for family, field in (
            ("perplexity", "perplexity"),
            ("perplexity", "bits_per_byte"),
            ("memory", "kv_bytes_per_token"),
        )
    ]
    rows: list[list[Cell]] = []
    for index, phase in enumerate(result.phases):
        if phase.trains == "variant":
            name = phase.details["row"]
            params = number_cell(phase.details["params"], f"phases[{index}].details.params")
            measured = [_measured_cell(found.get(name)) for found in columns]
            rows.append([Cell(phase.id), params, *measured])
    return rows


def _speed(result: RunResult) -> list[list[Cell]]:
    """List what the monitors saw of every phase that trained; memory is the device's, of a CPU the process's."""
    rows: list[list[Cell]] = []
    for index, phase in enumerate(result.phases):
        measured: dict[str, float] = phase.details.get("measured", {})
        if "tokens_per_s" not in measured:
            continue
        path = f"phases[{index}].details.measured"
        peak = "peak_allocated_bytes" if "peak_allocated_bytes" in measured else "peak_resident_bytes"
        rates = [
            number_cell(measured.get(name), f"{path}.{name}") for name in ("tokens_per_s", "mfu", "data_wait_share")
        ]
        sizes = [
            number_cell(measured.get(name), f"{path}.{name}", _byte_words) for name in (peak, "peak_reserved_bytes")
        ]
        rows.append([Cell(phase.id), *rates, *sizes])
    return rows


def _accuracy(metrics: dict[str, Metric]) -> list[list[Cell]]:
    """List every score of every task that teacher or student has."""
    rows: list[list[Cell]] = []
    for key, pair in _pairs(metrics, "accuracy"):
        if "task" in key.conditions:
            conditions = dict(key.conditions)
            task = str(conditions.pop("task"))
            words = key.field + (f" ({describe(conditions)})" if conditions else "")
            ratio = metrics.get(MetricKey("ratio", None, key.field, key.conditions).format())
            rows.append([Cell(task), Cell(words), *pair, _ratio_cell(ratio)])
    return rows


def _pairs(metrics: dict[str, Metric], family: str) -> list[tuple[MetricKey, list[Cell]]]:
    """Return the student's keys of a family, each with the cells of teacher and student."""
    found: dict[MetricKey, dict[str, Metric]] = {}
    for metric in metrics.values():
        key = parse_key(metric.key)
        if key.family == family and key.model in (TEACHER, STUDENT):
            found.setdefault(replace(key, model=STUDENT), {})[key.model] = metric
    return [
        (key, [_measured_cell(models.get(TEACHER)), _measured_cell(models.get(STUDENT))])
        for key, models in found.items()
    ]


def _generation(metrics: dict[str, Metric]) -> list[list[Cell]]:
    """List what the benchmark of generated text measured; only a student wins or ties against its teacher."""
    rows: list[list[Cell]] = []
    for key, pair in _pairs(metrics, "generation"):
        words = _GENERATED.get(key.field, key.field)
        label = Cell(f"{words} ({describe(dict(key.conditions))})" if key.conditions else words)
        rows.append([label, *pair])
    return rows


def _cases(result: RunResult) -> list[list[Cell]]:
    """List every case that was asked, with both answers; texts and log-probabilities are in eval_cases.csv."""
    rows: list[list[Cell]] = []
    for _, case in collect_verdicts(result):
        said = {answer.model: answer for answer in case.answers}
        cells = [Cell(case.id), Cell(case.kind), Cell(_quoted(case.expected), is_code=True)]
        for model in (TEACHER, STUDENT):
            answer = said.get(model)
            if answer is None or answer.answer is None:
                cells.append(Cell(NOTHING))
            else:
                cells.append(Cell(_quoted(answer.answer), is_code=True, is_bold=answer.is_correct))
        rows.append(cells)
    return rows


def _quoted(text: str) -> str:
    """Return the beginning of a text on one line, its spaces and line ends visible."""
    shown = text if len(text) <= LONGEST_ANSWER else text[: LONGEST_ANSWER - 3] + "..."
    return json.dumps(shown, ensure_ascii=False)[1:-1]


ShowMetric = Callable[[Metric | None], Cell]


def number_cell(value: float | None, key: str, show: Callable[[float], str] = number) -> Cell:
    """Return the cell of a number of the report, a dash where there is none."""
    return Cell(NOTHING) if value is None else Cell(show(value), key, is_number=True)


def _byte_words(value: float) -> str:
    return byte_text(value).replace(" ", "\u00a0")


def mean_text(value: float, spread: float | None) -> str:
    """Return `value ± spread`, the spread to the last digit of the value; without a spread the value alone."""
    text = number(value)
    if spread is None:
        return text
    return f"{text} ± {_spread(spread, 0 if 'e' in text else len(text.partition('.')[2]))}"


def _spread(std: float, digits: int) -> str:
    """Return a spread to the last digit of its value; one that would vanish there keeps its own digits."""
    return f"{std:.{digits}f}" if round(std, digits) else number(std)


def _measured_cell(metric: Metric | None) -> Cell:
    if metric is None:
        return Cell(NOTHING)
    return Cell(mean_text(metric.value, metric.spread or None), metric.key, is_number=True)


def _bytes_cell(metric: Metric | None) -> Cell:
    return Cell(NOTHING) if metric is None else number_cell(metric.value, metric.key, _byte_words)


def _ratio_cell(metric: Metric | None) -> Cell:
    if metric is None:
        return Cell(NOTHING)
    spread = f" ± {_spread(metric.spread, 3)}" if metric.spread else ""
    return Cell(f"{metric.value:.3f}{TIMES}{spread}", metric.key, is_number=True)
