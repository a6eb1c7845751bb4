"""The index of runs: what it holds equals the files, changes with them, and is made again when it is damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from caramba.artifacts.across_runs.gather import read_rows
from caramba.cli import main
from caramba.runs import index
from caramba.runs.events import append_event
from caramba.runs.files import lock
from caramba.runs.index import index_file, read_states
from caramba.runs.state import FAILED, FINISHED, INTERRUPTED, RUNNING, run_state

KEY = "perplexity.student.perplexity"


def make_run(folder: Path, value: float) -> Path:
    (folder / "artifacts").mkdir(parents=True)
    runs = [{"id": "pre", "train": {"steps": 10}}]
    (folder / "manifest.json").write_text(json.dumps({"name": "demo", "groups": [{"runs": runs}]}))
    (folder / "overrides.txt").write_text(f"lr={value}\n")
    append_event(folder, "run_started")
    append_event(folder, "metrics", phase="pre", step=10, values={"loss": value})
    append_event(folder, "run_finished")
    write_report(folder, value)
    (folder / "result.json").write_text('{"status": "finished"}')
    return folder


def write_report(folder: Path, value: float) -> None:
    metric = {"value": value, "unit": "", "std": None, "standard_error": 0.25, "n": 64}
    report = {"metrics": {KEY: metric}, "phases": [], "labels": {"proxy": "p"}}
    (folder / "artifacts" / "report.json").write_text(json.dumps(report))


@pytest.fixture(name="runs")
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setenv("CARAMBA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(index, "FEWEST", 1)
    return [make_run(tmp_path / "runs" / "demo" / f"run-{number}", 2.0 + number) for number in range(3)]


def test_states_and_rows_of_the_index_equal_those_of_the_files(
    runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = runs[0].parents[1]
    states, rows = read_states(folder, runs), read_rows(folder, runs)
    assert states == [run_state(run) for run in runs]
    assert [row.metrics[KEY].value for row in rows] == [2.0, 3.0, 4.0]
    assert [row.words for row in rows] == [{"lr": f"{value}"} for value in (2.0, 3.0, 4.0)]
    read = Path.read_text
    opened: list[Path] = []
    monkeypatch.setattr(Path, "read_text", lambda file, *args, **more: opened.append(file) or read(file, *args, **more))
    assert (read_states(folder, runs), read_rows(folder, runs)) == (states, rows)
    assert opened == [], "the second time no file of a run is read"
    monkeypatch.undo()
    monkeypatch.setattr(index, "FEWEST", 100)
    assert (read_states(folder, runs), read_rows(folder, runs)) == (states, rows), "without the index as with it"


def test_a_changed_a_locked_and_a_removed_run_are_read_again(runs: list[Path]) -> None:
    folder = runs[0].parents[1]
    read_states(folder, runs)
    read_rows(folder, runs)
    write_report(runs[1], 9.0)
    assert [row.metrics[KEY].value for row in read_rows(folder, runs)] == [2.0, 9.0, 4.0]
    append_event(runs[2], "run_failed", error="out of memory")
    assert [state.state for state in read_states(folder, runs)] == [FINISHED, FINISHED, FAILED]
    assert read_states(folder, runs)[2].error == "out of memory"
    with lock(runs[0]):
        assert [state.state for state in read_states(folder, runs)] == [RUNNING, FINISHED, FAILED]
        assert read_rows(folder, runs)[0].state == RUNNING
    assert read_states(folder, runs)[0].state == FINISHED
    assert len(read_states(folder, runs[:1])) == 1


def test_a_run_that_has_not_ended_is_always_read(runs: list[Path]) -> None:
    folder = runs[0].parents[1]
    (runs[0] / "result.json").unlink()
    assert read_states(folder, runs)[0].state == INTERRUPTED
    stamp_before = index.stamp(runs[0])
    with lock(runs[0]):
        assert read_states(folder, runs)[0].state == RUNNING
    assert index.stamp(runs[0]) == stamp_before


@pytest.mark.parametrize("damage", ["garbage", "folder", "read-only"])
def test_status_works_whatever_happened_to_the_index(runs: list[Path], damage: str, capsys) -> None:
    folder = runs[0].parents[1]
    assert main(["status", str(folder), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    file = index_file(folder)
    if damage == "garbage":
        file.write_bytes(b"no database" * 1000)
    elif damage == "folder":
        file.unlink()
        file.mkdir()
    else:
        os.chmod(file.parent, 0o500)
    try:
        assert main(["status", str(folder), "--json"]) == 0
    finally:
        os.chmod(file.parent, 0o700)
    second = json.loads(capsys.readouterr().out)
    assert [run["state"] for run in second["runs"]] == [run["state"] for run in first["runs"]]


def test_damaged_runs_and_hostile_names_end_no_command(runs: list[Path], capsys) -> None:
    folder = runs[0].parents[1]
    (runs[0] / "artifacts" / "report.json").write_text('{"metrics": {"a": 1}}')
    (runs[1] / "overrides.txt").write_bytes(b"\xff\xfe")
    make_run(folder / "demo" / "a\nb\x1b[31m", 5.0)
    assert main(["status", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "a\\nb\\x1b[31m" in shown
    assert len(shown.splitlines()) == 5
    assert main(["collect", str(folder)]) == 0
    said = capsys.readouterr()
    assert "2 of 4 runs finished (2 damaged)" in said.out
    assert said.err.count("omitted") == 2
    for words in (
        [runs[0], runs[2]],
        [runs[2], runs[1]],
        [runs[2], folder / "demo" / "a\nb\x1b[31m", runs[0]],
    ):
        assert main(["compare", *map(str, words)]) == 2
        error = capsys.readouterr().err
        assert "cannot be read" in error
        assert "report.json" in error or "overrides.txt" in error
    with open(runs[2] / "events.jsonl", "ab") as file:
        file.write(b"\x00\xff\n{}\n")
    assert main(["compare", str(runs[2]), str(folder / "demo" / "a\nb\x1b[31m")]) == 2
    assert "events.jsonl: cannot be read" in capsys.readouterr().err


def test_collect_reads_the_index(runs: list[Path], capsys) -> None:
    folder = str(runs[0].parents[1])
    assert main(["collect", folder]) == 0
    first = capsys.readouterr().out
    assert main(["collect", folder]) == 0
    assert capsys.readouterr().out == first
    assert "3 of 3 runs finished" in first
