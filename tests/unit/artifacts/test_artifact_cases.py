"""What a reader sees of the cases that verify eval asked, and of an accuracy benchmark."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from caramba.artifacts.latex import build_tables
from caramba.artifacts.metrics import collect
from caramba.artifacts.rows import cases_csv
from caramba.artifacts.tables import CASE_HEAD, WORDS, Cell, Table, _without_teacher
from caramba.artifacts.write import write
from caramba.result import Answer, BenchmarkResult, Case, Check, Metric, RunResult, Verdict, to_plain

ASKED = Case(
    "pick",
    "choice_logprob",
    'a "b",\nc',
    "é&_",
    (
        Answer("teacher", "é&_", True, None, (-1.5, -2.0), (-1.5, -1.0)),
        Answer("student", "no", False, None, (-3.0, -2.5), (-3.0, -1.25)),
    ),
    ("é&_", "no"),
    False,
    3,
)
SILENT = Case(
    "sum",
    "int_greedy",
    "1 + 1 = ",
    "2",
    (Answer("teacher", "2", True, "2\n"), Answer("student", None, False, "")),
)
CHECKS = (
    Check("student_accuracy", 0.5, 0.75, "share", is_minimum=True),
    Check("accuracy_drop", 0.5, 0.5, "share"),
)
VERDICT = Verdict("eval", "global", CHECKS, cases=(ASKED, SILENT))


def accuracy_benchmark() -> BenchmarkResult:
    metrics: list[Metric] = []
    for model, value in (("teacher", 0.5), ("student", 0.25)):
        metrics.append(Metric(f"accuracy.{model}.acc@task=cats_choice", value, "", 8, 0.125, "acc"))
        metrics.append(Metric(f"accuracy.{model}.mean@tasks=1", value, "", 1, 0.125, "acc"))
    rows = ({"model": "teacher", "task": "cats_choice", "metric": "acc", "value": 0.5, "standard_error": None},)
    return BenchmarkResult("acc", "accuracy", tuple(metrics), rows)


def with_cases(result: RunResult) -> RunResult:
    benchmarks = (*result.benchmarks, accuracy_benchmark())
    return dataclasses.replace(result, verdicts=(*result.verdicts, VERDICT), benchmarks=benchmarks)


def test_a_verdict_with_cases_comes_back_from_json() -> None:
    again = TypeAdapter(Verdict).validate_python(json.loads(json.dumps(to_plain(VERDICT))))
    assert again == VERDICT
    assert [item.passed for item in again.checks] == [False, True]


def test_every_case_and_model_is_a_row(result: RunResult) -> None:
    assert cases_csv(result) is None
    text = cases_csv(with_cases(result))
    assert text is not None
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [(row["case"], row["model"], row["answer"], row["is_correct"]) for row in rows] == [
        ("pick", "teacher", "é&_", "True"),
        ("pick", "student", "no", "False"),
        ("sum", "teacher", "2", "True"),
        ("sum", "student", "", "False"),
    ]
    assert rows[0]["prompt"] == ASKED.prompt
    assert json.loads(rows[1]["logprobs_per_token"]) == [-3.0, -1.25]
    assert json.loads(rows[0]["choices"]) == ["é&_", "no"]
    assert rows[2]["text"] == "2\n"
    assert (rows[0]["dropped_tokens"], rows[2]["length_normalized"]) == ("3", "")


def test_tables_show_cases_side_by_side_and_bounds_by_their_side(result: RunResult) -> None:
    full = with_cases(result)
    tables = build_tables(full, collect(full))
    assert tables is not None
    assert r"eval & student\_accuracy (share) & 0.5000 & $\ge$ 0.7500 & \textbf{failed} \\" in tables
    assert r"eval & accuracy\_drop (share) & 0.5000 & $\le$ 0.5000 & passed \\" in tables
    row = r"pick & choice\_logprob & \texttt{é\&\_} & \textbf{\texttt{é\&\_}} & \texttt{no} \\"
    assert row in tables
    assert r"sum & int\_greedy & \texttt{2} & \textbf{\texttt{2}} & -- \\" in tables
    assert r"cats\_choice & acc & 0.5000 $\pm$ 0.1250 & 0.2500 $\pm$ 0.1250 & 0.500$\times$" in tables
    assert r"Accuracy, mean over tasks $\uparrow$ & 0.5000 $\pm$ 0.1250 & 0.2500" in tables


def test_case_table_without_teacher_has_no_teacher_column() -> None:
    with_teacher = Table("cases", "Cases of ", "run", "", CASE_HEAD, [[Cell(text) for text in CASE_HEAD]])
    table = _without_teacher(with_teacher)
    assert table.head == ("Case", "Kind", "Expected", "Model answers")
    assert set(table.head) <= WORDS, "columns of text align left"


@pytest.mark.usefixtures("blank_figures")
def test_the_files_are_there_when_there_is_something_to_write(result: RunResult, tmp_path: Path) -> None:
    result = dataclasses.replace(result, benchmarks=result.benchmarks[:1], transplant=None)
    names = {entry.path for entry in write(with_cases(result), tmp_path).entries}
    assert {"eval_cases.csv", "accuracy.csv"} <= names
    report = json.loads((tmp_path / "artifacts/report.json").read_text())
    assert report["verify"][-1]["cases"][1]["answers"][1]["answer"] is None
    assert report["verify"][-1]["checks"][0]["is_minimum"] is True
    assert report["metrics"]["ratio.acc@task=cats_choice"]["value"] == 0.5
    names = {entry.path for entry in write(result, tmp_path).entries}
    assert not {"eval_cases.csv", "accuracy.csv"} & names
    assert not (tmp_path / "artifacts/eval_cases.csv").exists()
    failed = dataclasses.replace(
        result, benchmarks=(*result.benchmarks, BenchmarkResult("acc", "accuracy", error="E: x"))
    )
    write(failed, tmp_path)
    omitted = {
        item["name"]: item["reason"] for item in json.loads((tmp_path / "artifacts/report.json").read_text())["omitted"]
    }
    assert omitted["accuracy.csv"] == omitted["summary.png: accuracy"] == "accuracy benchmark failed: acc: E: x"
