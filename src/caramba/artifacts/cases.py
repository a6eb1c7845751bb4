"""The questions of verify eval with every model's answer: as CSV rows and as a table."""

from __future__ import annotations

import csv
import io
import json

from caramba.result import Answer, Case, RunResult, Verdict

FILE = "eval_cases.csv"
COLUMNS = (
    *("run_id", "case", "kind", "model", "is_correct", "expected", "answer", "text", "prompt"),
    *("choices", "logprobs", "logprobs_per_token", "length_normalized", "dropped_tokens"),
)


def collect_verdicts(result: RunResult) -> list[tuple[Verdict, Case]]:
    """Return every case with the verdict that it belongs to, in the order in which they were asked."""
    return [(verdict, case) for verdict in result.verdicts for case in verdict.cases]


def cases_csv(result: RunResult) -> str | None:
    """Return one row per case and model, or None without cases; lists are JSON, None is an empty cell."""
    rows = [
        _row(verdict, case, answer) for verdict, case in collect_verdicts(result) for answer in case.answers
    ]
    if not rows:
        return None
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(rows)
    return text.getvalue()


def _row(verdict: Verdict, case: Case, answer: Answer) -> list[object]:
    def format_list(values: tuple[object, ...]) -> str:
        return json.dumps(values, ensure_ascii=False) if values else ""

    row: list[object] = [verdict.run_id, case.id, case.kind, answer.model, answer.is_correct, case.expected]
    row += [answer.answer, answer.text, case.prompt, format_list(case.choices)]
    row += [format_list(answer.logprobs), format_list(answer.logprobs_per_token), case.length_normalized]
    return ["" if value is None else value for value in [*row, case.dropped_tokens]]
