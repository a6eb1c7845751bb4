"""mode=chat in a manifest: a conversation after training, from a script or a pipe, kept in the run directory."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from caramba.cli import main
from caramba.config.manifest import RunConfig
from caramba.config.parse import parse_as
from caramba.console import logger
from caramba.errors import ConfigError
from caramba.runs.files import remove_recorded
from tests.integration.commands import only_run
from tests.integration.export.samples import DBA, loud, make_run, transformer

SAY = {"messages": ["abc", "/reset", "one", "two"], "generate": {"max_new_tokens": 6, "temperature": 0.8}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose student is talked to, and its tokens beside it."""
    return make_run(tmp_path_factory.mktemp("trained") / "a", loud(transformer(DBA)))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CARAMBA_HOME", str(cache))
    monkeypatch.setattr(logger, "quiet", False)


def written(folder: Path, student: Path, chat: dict[str, Any]) -> str:
    model = json.loads((student / "manifest.json").read_text())["model"] | {"checkpoint": str(student)}
    data = {"type": "tokens", "path": str(student.parents[2] / "tokens")}
    run = {"id": "talk", "mode": "chat", "seed": 5, "chat": chat}
    manifest = {"name": "alone", "model": model, "groups": [{"name": "main", "data": data, "runs": [run]}]}
    (folder / "manifest.yaml").write_text(yaml.safe_dump(manifest))
    return str(folder / "manifest.yaml")


def test_a_scripted_conversation_is_held_once_and_an_interrupted_one_goes_on(
    tmp_path: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", written(tmp_path, trained, SAY), "--quiet"]) == 0
    assert "> two\n" in capsys.readouterr().out
    run = only_run(tmp_path)
    file = run / "chats" / "talk.json"
    whole = json.loads(file.read_text())
    turns = whole["turns"]
    assert [(turn["user"], turn["seed"], turn["begins"]) for turn in turns] == [
        ("abc", 5, True),
        ("one", 6, True),
        ("two", 7, False),
    ]
    before = file.stat().st_mtime_ns
    assert main(["resume", str(run), "--quiet"]) == 0
    assert file.stat().st_mtime_ns == before
    # As an interrupt after the second answer leaves it: no stage, and a file of two turns.
    (stage,) = (run / "stages").glob("*-talk.json")
    remove_recorded(stage)
    file.write_text(json.dumps(whole | {"turns": turns[:2]}))
    capsys.readouterr()
    assert main(["resume", str(run), "--quiet"]) == 0
    assert "> one\n" not in capsys.readouterr().out
    assert json.loads(file.read_text())["turns"] == turns


def test_lines_come_from_a_pipe_and_without_any_the_conversation_stays_open(
    tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    short = {"generate": {"max_seq_len": 64, "max_new_tokens": 9}}
    assert main(["run", written(tmp_path, trained, short)]) == 0
    assert "no messages, no terminal and no lines" in capsys.readouterr().out
    run = only_run(tmp_path)
    assert not (run / "chats").exists()
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{'x' * 200}\nabc\n/stats\n/quit\nnever said\n"))
    assert main(["resume", str(run), "--quiet"]) == 0
    said = capsys.readouterr()
    assert "1 turns, " in said.out
    assert "are left next to the answer" in said.err
    (turn,) = json.loads((run / "chats" / "talk.json").read_text())["turns"]
    assert turn["user"] == "abc"
    by_hand = ["chat", str(trained), "--device", "cpu", "--seed", "5", "--quiet", "--max-new-tokens", "9"]
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\n"))
    assert main(by_hand) == 0
    assert capsys.readouterr().out.strip() == turn["assistant"]


def test_what_cannot_be_said_is_refused_before_anything_runs(
    tmp_path: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow = SAY | {"generate": {"max_new_tokens": 6, "max_seq_len": 20}}
    for chat, text in (
        (SAY | {"role": "teacher"}, "chat.role=teacher, and the model has no teacher"),
        (SAY | {"generate": {"max_seq_len": 64}}, "max_new_tokens=128 leaves no room for a message in 64"),
        (narrow | {"messages": ["long" * 9]}, "tokens and 14 are left next to the answer"),
    ):
        assert main(["run", written(tmp_path, trained, chat)]) == 2
        assert text in capsys.readouterr().err
        assert not list(tmp_path.glob("runs/*/*/chats"))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"chat": SAY}, "mode=train has no use for chat; set mode: chat"),
        ({"mode": "chat", "steps": 3}, "mode=chat trains and verifies nothing"),
        ({"mode": "chat", "chat": {"messages": [""]}}, "chat.messages"),
    ],
)
def test_a_run_talks_or_trains(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse_as(RunConfig, {"id": "talk", **values})
