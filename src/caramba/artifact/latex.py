"""tables.tex: booktabs tables in which every number names its metric key in a comment on its line."""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import dataclass, replace

from caramba.artifact.cases import asked
from caramba.artifact.controls import control_rows
from caramba.artifact.key import MetricKey, parse_key
from caramba.artifact.metrics import STUDENT, TEACHER, describe, headline, verdict_keys
from caramba.artifact.style import byte_text, name_of
from caramba.artifact.summary import ratio_key, stage_bars
from caramba.result import Metric, RunResult

NOTHING = "--"
LONGEST_ANSWER = 24

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    **{sign: "\\" + sign for sign in "&%$#_{}"},
}
_HEADER = """\
% Tables of run {name}. Needs \\usepackage{{booktabs}}.
% Each row ends with the keys of its numbers in report.json's "metrics", in the order of the cells;
% after a plus-minus stands the std of the same key, KEY#bound is the bound of that check under "verify",
% a key that begins with "transplant" or "phases" is a path in report.json, and a dash stands for no number.
"""


@dataclass(frozen=True)
class Cell:
    """The LaTeX of a table cell, and the metric key of the number in it."""

    text: str
    key: str | None = None


def build_tables(result: RunResult, metrics: dict[str, Metric]) -> str | None:
    """Return the tables that have rows, or None when none has."""
    note = f" Proxy teacher: {escape(result.labels['proxy'])}." if "proxy" in result.labels else ""
    compared, where = _comparison(metrics), _conditions(metrics)
    caption = rf"\texttt{{{escape(result.name)}}}"
    tables = [
        _table("comparison", f"Teacher and student of {caption}.{where}{note}", COMPARISON_HEAD, compared),
        _table("stages", f"Held-out perplexity of {caption} by stage.{note}", STAGE_HEAD, _stages(metrics)),
        _table(
            "controls",
            f"Controls of {caption} from the same teacher on the same held-out windows.{note}",
            CONTROL_HEAD,
            _controls(result, metrics),
        ),
        _table(
            "variants",
            f"Attentions of {caption} from scratch.{note}",
            VARIANT_HEAD,
            _variants(result, metrics),
        ),
        _table("accuracy", f"Accuracy of {caption} by task.{note}", ACCURACY_HEAD, _accuracy(metrics)),
        _table(
            "transplant",
            f"Surgery of {caption}, by attention layer.{note}",
            TRANSPLANT_HEAD,
            _transplant(result),
        ),
        _table("verification", f"Verification of {caption}.{note}", VERIFY_HEAD, _verification(result)),
        _table("cases", f"Cases of {caption}, correct answers in bold.{note}", CASE_HEAD, _cases(result)),
    ]
    present = [table for table in tables if table is not None]
    return "\n".join([_HEADER.format(name=_comment(result.name)), *present]) if present else None


COMPARISON_HEAD = ("Metric", "Teacher", "Student", "Change")
STAGE_HEAD = ("Stage", "Perplexity", "Ratio to teacher")
ACCURACY_HEAD = ("Task", "Metric", "Teacher", "Student", "Change")
VARIANT_HEAD = ("Model", "Parameters", "Perplexity", "Bits per byte", "Bytes per token")
CONTROL_HEAD = ("Model", "Tokens", "Bytes per token", "KV ratio", "PPL ratio", "KL", "Top-1")
CASE_HEAD = ("Case", "Kind", "Expected", "Teacher says", "Student says")
# Columns of words stand left, numbers right.
WORDS = frozenset({"Metric", "Model", "Stage", "Task", "Type", "Check", "Result", *CASE_HEAD})
TRANSPLANT_HEAD = ("Layer", "Cached", "KV ratio", "Energy kept", "Block error", "Frequencies")
VERIFY_HEAD = ("Type", "Check", "Value", "Bound", "Result")

MOST, LEAST = r"$\le$", r"$\ge$"
DOWN, UP = r" $\downarrow$", r" $\uparrow$"
# Family, field, words, direction that is better, unit.
_COMPARED = (
    ("perplexity", "perplexity", "Perplexity", DOWN, ""),
    ("perplexity", "bits_per_byte", "Bits per byte", DOWN, ""),
    ("accuracy", "mean", "Accuracy, mean over tasks", UP, ""),
    ("latency", "tok_s", "Throughput", UP, "tokens/s"),
    ("memory", "kv_bytes_per_token", "KV cache per token", DOWN, "bytes"),
    ("memory", "model_bytes", "Model size", "", ""),
)


def escape(text: str) -> str:
    """Return text that pdflatex prints as written: specials escaped, characters it has no glyph for by code point."""
    out: list[str] = []
    for letter in unicodedata.normalize("NFC", text):
        if letter in _SPECIAL:
            out.append(_SPECIAL[letter])
        elif letter.isspace():
            out.append(" ")
        elif " " <= letter <= "~" or ("\u00c0" <= letter <= "\u00ff" and letter not in "\u00d7\u00f7"):
            out.append(letter)
        elif unicodedata.category(letter) != "Cc":
            out.append(f"[U+{ord(letter):04X}]")
    # Two hyphens in a row would print as one dash.
    return re.sub(r"-(?=-)", "-{}", "".join(out))


def number(value: float) -> str:
    """Return a number with four significant digits, whole ones in full, thousands apart."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}".replace(",", "{,}").replace("-", "$-$")
    if not 1e-3 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.3e}".split("e")
        return rf"${mantissa}\times10^{{{int(exponent)}}}$"
    digits = max(0, 3 - len(str(int(abs(value)))) + 1) if abs(value) >= 1 else 4
    return f"{value:,.{digits}f}".replace(",", "{,}").replace("-", "$-$")


def _comparison(metrics: dict[str, Metric]) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    for family, field, words, arrow, unit in _COMPARED:
        found = headline(metrics, family, field)
        pair = [found.get(TEACHER), found.get(STUDENT)]
        any_metric = pair[0] or pair[1]
        if any_metric is None:
            continue
        label = Cell(escape(words) + arrow + (f" ({escape(unit)})" if unit else ""))
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
            notes.append(f" {words}: {escape(describe(conditions))}.")
    return "".join(notes)


def _stages(metrics: dict[str, Metric]) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    for model, metric in stage_bars(metrics):
        conditions = dict(parse_key(metric.key).conditions)
        where = conditions if model == STUDENT else {"model": model, **conditions}
        ratio = metrics.get(MetricKey("ratio", None, "perplexity", where).format())
        rows.append([Cell(escape(name_of(model))), _measured_cell(metric), _ratio_cell(ratio)])
    return rows


def _transplant(result: RunResult) -> list[list[Cell]]:
    """List what surgery kept of each converted layer; the error is the block output's, held out, relative RMS."""
    rows: list[list[Cell]] = []
    for index, layer in enumerate(result.transplant.layers if result.transplant is not None else ()):

        def cell(field: str, value: float | None, index: int = index) -> Cell:
            return (
                Cell(NOTHING) if value is None else Cell(number(value), f"transplant.layers[{index}].{field}")
            )

        ratio = Cell(
            rf"{layer.teacher_cached / layer.cached:.2f}$\times$", f"transplant.layers[{index}].cached"
        )
        rows.append(
            [
                Cell(str(index)),
                cell("cached", layer.cached),
                ratio,
                cell("energy_kept", layer.energy_kept),
                cell("error", layer.error),
                cell("frequencies", layer.frequencies),
            ]
        )
    return rows


def _verification(result: RunResult) -> list[list[Cell]]:
    """List every check but those of single layers, which are no thresholds and stay in report.json."""
    rows: list[list[Cell]] = []
    for verdict, keys in zip(result.verdicts, verdict_keys(result.verdicts), strict=True):
        for check, key in zip(verdict.checks, keys, strict=True):
            if check.bound is None and re.search(r"_layer\d+$", check.name):
                continue
            name = escape(check.name) + (
                f" ({escape(check.unit)})" if check.unit not in ("", "ratio") else ""
            )
            bound = (
                Cell(NOTHING)
                if check.bound is None
                else Cell(rf"{LEAST if check.is_minimum else MOST} {number(check.bound)}", f"{key}#bound")
            )
            outcome = "recorded" if check.bound is None else "passed" if check.passed else r"\textbf{failed}"
            rows.append(
                [Cell(escape(verdict.type)), Cell(name), Cell(number(check.value), key), bound, Cell(outcome)]
            )
    return rows


def _controls(result: RunResult, metrics: dict[str, Metric]) -> list[list[Cell]]:
    """List what was compared, with the tokens that each trained on after the teacher."""
    rows: list[list[Cell]] = []
    for row in control_rows(result):
        found = {
            field: metrics.get(MetricKey("controls", row["model"], field).format())
            for field in ("tokens", "kv_bytes_per_token", "kv_ratio", "ppl_ratio", "kl", "top1")
        }
        cells = {name: _measured_cell(metric) for name, metric in found.items()}
        cells["kv_ratio"], cells["ppl_ratio"] = (
            _ratio_cell(found["kv_ratio"]),
            _ratio_cell(found["ppl_ratio"]),
        )
        rows.append([Cell(escape(name_of(row["model"]))), *cells.values()])
    return rows


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
            params = Cell(number(phase.details["params"]), f"phases[{index}].details.params")
            measured = [_measured_cell(found.get(name)) for found in columns]
            rows.append([Cell(escape(phase.id)), params, *measured])
    return rows


def _accuracy(metrics: dict[str, Metric]) -> list[list[Cell]]:
    """List every score of every task that teacher or student has."""
    found: dict[MetricKey, dict[str, Metric]] = {}
    for metric in metrics.values():
        key = parse_key(metric.key)
        if key.family == "accuracy" and "task" in key.conditions and key.model in (TEACHER, STUDENT):
            found.setdefault(replace(key, model=STUDENT), {})[key.model] = metric
    rows: list[list[Cell]] = []
    for key, models in found.items():
        conditions = dict(key.conditions)
        task = str(conditions.pop("task"))
        words = key.field + (f" ({describe(conditions)})" if conditions else "")
        ratio = metrics.get(MetricKey("ratio", None, key.field, key.conditions).format())
        pair = [_measured_cell(models.get(TEACHER)), _measured_cell(models.get(STUDENT))]
        rows.append([Cell(escape(task)), Cell(escape(words)), *pair, _ratio_cell(ratio)])
    return rows


def _cases(result: RunResult) -> list[list[Cell]]:
    """List every case that was asked, with both answers; texts and log-probabilities are in eval_cases.csv."""
    rows: list[list[Cell]] = []
    for _, case in asked(result):
        said = {answer.model: answer for answer in case.answers}
        cells = [Cell(escape(case.id)), Cell(escape(case.kind)), Cell(_quoted(case.expected))]
        for model in (TEACHER, STUDENT):
            answer = said.get(model)
            text = NOTHING if answer is None or answer.answer is None else _quoted(answer.answer)
            cells.append(Cell(rf"\textbf{{{text}}}" if answer is not None and answer.is_correct else text))
        rows.append(cells)
    return rows


def _quoted(text: str) -> str:
    """Return the beginning of a text on one line, its spaces and line ends visible."""
    shown = text if len(text) <= LONGEST_ANSWER else text[: LONGEST_ANSWER - 3] + "..."
    return rf"\texttt{{{escape(json.dumps(shown, ensure_ascii=False)[1:-1])}}}"


def _measured_cell(metric: Metric | None) -> Cell:
    if metric is None:
        return Cell(NOTHING)
    text = number(metric.value)
    if not metric.std:
        return Cell(text, metric.key)
    # The spread is given to the last digit of its value; one that would vanish there keeps its own digits.
    digits = len(text.partition(".")[2]) if "e" not in text and "times" not in text else 0
    spread = f"{metric.std:.{digits}f}" if round(metric.std, digits) else number(metric.std)
    return Cell(rf"{text} $\pm$ {spread}", metric.key)


def _bytes_cell(metric: Metric | None) -> Cell:
    return Cell(NOTHING) if metric is None else Cell(byte_text(metric.value).replace(" ", "~"), metric.key)


def _ratio_cell(metric: Metric | None) -> Cell:
    if metric is None:
        return Cell(NOTHING)
    spread = rf" $\pm$ {metric.std:.3f}" if metric.std else ""
    return Cell(rf"{metric.value:.3f}$\times${spread}", metric.key)


def _table(label: str, caption: str, head: tuple[str, ...], rows: list[list[Cell]]) -> str | None:
    if not rows:
        return None
    columns = "".join("l" if name in WORDS else "r" for name in head)
    lines = [
        r"\begin{table}[t]",
        r"  \centering",
        rf"  \caption{{{caption}}}",
        rf"  \label{{tab:caramba-{label}}}",
        rf"  \begin{{tabular}}{{{columns}}}",
        r"    \toprule",
        f"    {' & '.join(head)} \\\\",
        r"    \midrule",
        *(_row(row) for row in rows),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _row(cells: list[Cell]) -> str:
    keys = " | ".join(cell.key or "-" for cell in cells)
    return f"    {' & '.join(cell.text for cell in cells)} \\\\ % {_comment(keys)}"


def _comment(text: str) -> str:
    """Return text on one line: a line break would end the comment."""
    return " ".join(text.split())
