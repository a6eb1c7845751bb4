"""The archive of runs: moved whole and back, refused where it would lose something, listed and deleted."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from caramba.cli import main
from caramba.runs import list_runs
from caramba.runs.archive import ARCHIVE, LOG, list_archive
from caramba.runs.files import LOCK, lock


@pytest.fixture(name="runs")
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.chdir(tmp_path)
    made = [Path("runs") / "demo" / f"run-{number}" for number in range(3)]
    for number, run in enumerate(made):
        (run / "checkpoints").mkdir(parents=True)
        (run / "manifest.json").write_text('{"name": "demo"}')
        (run / "overrides.txt").write_text("" if number < 2 else "model.teacher.checkpoint=runs/demo/run-0\n")
        (run / "checkpoints" / "weights").write_bytes(bytes([number]) * 1000)
    return made


def digest(folder: Path) -> str:
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != LOCK)
    text = [f"{file.relative_to(folder)} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files]
    return "\n".join(text)


def names() -> list[str]:
    return sorted(run.name for run in list_runs())


def test_undo_brings_back_the_last_call_byte_for_byte(runs: list[Path], capsys) -> None:
    before = [digest(run) for run in runs]
    assert main(["rm", str(runs[0])]) == 0
    assert "demo/run-2, which cannot resume" in capsys.readouterr().out
    assert main(["rm", "demo/run-1", "runs/demo/run-2"]) == 0
    assert names() == []
    assert main(["rm", "--undo"]) == 0
    assert names() == ["run-1", "run-2"]
    assert main(["rm", "--undo"]) == 0
    assert names() == ["run-0", "run-1", "run-2"]
    assert [digest(run) for run in runs] == before
    assert main(["rm", "--undo"]) == 2
    assert "is empty" in capsys.readouterr().err


def test_named_runs_come_back_and_are_deleted(runs: list[Path], capsys) -> None:
    assert main(["rm", *map(str, runs)]) == 0
    assert main(["rm", "--undo", "demo/run-1"]) == 0
    assert names() == ["run-1"]
    capsys.readouterr()
    assert main(["rm", "--list"]) == 0
    listed = capsys.readouterr().out
    assert "demo/run-0" in listed
    assert "demo/run-1" not in listed
    assert main(["rm", "--purge", "run-0"]) == 0
    assert "deleted 1 run" in capsys.readouterr().out
    assert [item.name for item in list_archive(Path("runs").absolute())] == ["demo/run-2"]
    assert main(["rm", "--purge", "all"]) == 0
    assert list_archive(Path("runs").absolute()) == []
    assert names() == ["run-1"]


def test_nothing_moves_where_one_run_cannot(runs: list[Path], capsys) -> None:
    with lock(runs[1]):
        assert main(["rm", str(runs[0]), str(runs[1])]) == 2
    assert "is running this run" in capsys.readouterr().err
    assert names() == ["run-0", "run-1", "run-2"]
    assert list_archive(Path("runs").absolute()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "got no run"),
        (["demo"], "names all runs of demo; give the run itself"),
        (["runs/demo/run-9"], "no run there"),
        (["--undo", "--list"], "give one of them"),
        (["--purge"], "deletes for good; name runs"),
        (["--purge", "demo/run-9"], "not in the archive"),
    ],
)
def test_mistakes_are_named(runs: list[Path], words: list[str], message: str, capsys) -> None:
    assert main(["rm", *words]) == 2
    assert message in capsys.readouterr().err
    assert names() == ["run-0", "run-1", "run-2"]


def test_a_damaged_log_and_a_taken_place_lose_nothing(runs: list[Path], capsys) -> None:
    assert main(["rm", str(runs[0])]) == 0
    log = Path("runs") / ARCHIVE / LOG
    log.write_text(json.dumps({"run": "demo/run-0"}) + '\n{"run": "de')
    assert [item.name for item in list_archive(Path("runs").absolute())] == ["demo/run-0"]
    runs[0].mkdir()
    assert main(["rm", "--undo"]) == 2
    assert "it exists; move it away" in capsys.readouterr().err
    runs[0].rmdir()
    assert main(["rm", "--undo"]) == 0
    assert names() == ["run-0", "run-1", "run-2"]


def test_other_commands_do_not_see_the_archive(runs: list[Path], capsys) -> None:
    assert main(["rm", str(runs[0])]) == 0
    capsys.readouterr()
    assert main(["status", "--json"]) == 0
    assert [Path(run["run"]).name for run in json.loads(capsys.readouterr().out)["runs"]] == [
        "run-1",
        "run-2",
    ]
    assert main(["studio"]) == 0
    assert "2 runs" in capsys.readouterr().out
