"""verify eval and the accuracy benchmark from the command line to the files of a run."""

from __future__ import annotations

import csv
import importlib.util
import json
from pathlib import Path

import pytest

from caramba.errors import ConfigError
from caramba.launch.run import prepare
from tests.integration.commands import SMALL, SMALL_TEACHER, caramba, only_run
from tests.integration.test_lm_eval import CHOICE, DOCUMENTS, needs_harness

CASES = (
    "{id: sum, kind: int_greedy, prompt: 'x = ', answer: 3}, "
    "{id: self, kind: choice_logprob, prompt: 'def __init__(', choices: [self, import], answer: self}"
)
EVAL = f"{{type: eval, max_new_tokens: 4, cases: [{CASES}], thresholds: {{min_student_accuracy: 0}}}}"
KVCACHE = "{type: kvcache, min_ratio: 4, fail_fast: true}"
QUICK = ("experiment=smoke", "device=cpu", *SMALL, *SMALL_TEACHER)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "cats.json").write_text("\n".join(json.dumps(item) for item in DOCUMENTS))
    (folder / "cats_choice.yaml").write_text(CHOICE.format(data=folder / "cats.json"))
    return folder


def accuracy(tasks: Path, **keys: object) -> str:
    more = "".join(f", {key}: {value}" for key, value in keys.items())
    return f"[{{id: acc, config: {{type: accuracy, tasks: [cats_choice], include_path: {tasks}{more}}}}}]"


@needs_harness
@pytest.mark.slow
def test_cases_and_tasks_reach_every_file_of_a_run(tmp_path: Path, cache: Path, tasks: Path) -> None:
    words = [*QUICK, f"verify.checks=[{EVAL}, {KVCACHE}]", f"benchmark.benchmarks={accuracy(tasks, limit=2)}"]
    done = caramba(words, tmp_path, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = only_run(tmp_path) / "artifacts"
    report = json.loads((folder / "report.json").read_text())
    metrics = report["metrics"]
    assert metrics["verify.kvcache.plan_difference"]["value"] == 0
    assert metrics["verify.kvcache.ratio"]["value"] == 4
    assert 0 <= metrics["verify.eval.student_accuracy"]["value"] <= 1
    (asked,) = [item["cases"] for item in report["verify"] if item["type"] == "eval"]
    assert [(case["id"], [answer["model"] for answer in case["answers"]]) for case in asked] == [
        ("sum", ["teacher", "student"]),
        ("self", ["teacher", "student"]),
    ]
    assert metrics["accuracy.student.acc@task=cats_choice"]["n"] == 2
    assert (
        metrics["accuracy.teacher.mean@tasks=1"]["value"] == metrics["accuracy.teacher.acc@task=cats_choice"]["value"]
    )
    rows = list(csv.DictReader((folder / "accuracy.csv").open()))
    assert {(row["model"], row["metric"]) for row in rows} >= {("teacher", "acc"), ("student", "acc_norm")}
    assert len(list(csv.DictReader((folder / "eval_cases.csv").open()))) == 4
    assert r"cats\_choice & acc" in (folder / "tables.tex").read_text()


def test_what_could_not_be_asked_after_training_stops_the_run_before_it(tmp_path: Path, cache: Path) -> None:
    words = [
        *QUICK,
        f"verify.checks=[{{type: eval, tokenizer: nowhere, cases: [{CASES}]}}]",
        "benchmark=none",
    ]
    done = caramba(words, tmp_path, cache)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "nowhere: there is no tokenizer file" in done.stderr
    assert not list(tmp_path.glob("runs/*/*"))


@needs_harness
def test_an_accuracy_benchmark_names_a_folder_that_is_not_there(tmp_path: Path) -> None:
    words = [f"benchmark.benchmarks={accuracy(tmp_path / 'none')}"]
    with pytest.raises(ConfigError, match=r"benchmarks.acc \(accuracy\): include_path=.*none is not a folder"):
        prepare(words, [])


def test_without_the_harness_an_accuracy_benchmark_is_refused_before_a_run_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else found(name))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"benchmarks.acc \(accuracy\).*not installed; pip install 'caramba\[eval\]'"):
        prepare([f"benchmark.benchmarks={accuracy(tmp_path)}"], [])
    assert not list(tmp_path.iterdir())
