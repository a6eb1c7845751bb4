"""Words that complete a command line: commands, flags, runs, keys and values, and never an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from caramba.launch import completion, hydra_cli
from caramba.launch.completion import complete_word
from caramba.launch.overrides import parse_argv


@pytest.mark.parametrize(
    ("before", "typed", "some"),
    [
        ([], "", ["launch", "init", "generate"]),
        ([], "gen", ["generate"]),
        ([], "trainer.ear", ["trainer.early_stopping."]),
        (["launch"], "train.st", ["train.steps=", "train.stochastic_rounding="]),
        (["launch", "model=tiny"], "model.embedder.d", ["model.embedder.d_model="]),
        (["compile"], "trainer.profiler=", ["trainer.profiler=simple"]),
        (["-m"], "trainer.profiler=p", ["trainer.profiler=pytorch"]),
        (["launch"], "logger.wandb=", ["logger.wandb=true", "logger.wandb=false"]),
        (["launch"], "--cf", ["--cfg"]),
        (["generate", "latest"], "--cache-k", ["--cache-kind"]),
        (["resume"], "la", ["latest"]),
        (["rm", "runs/a"], "la", ["latest"]),
        (["review"], "", ["latest"]),
    ],
)
def test_words(before: list[str], typed: str, some: list[str]) -> None:
    found = complete_word(before, typed)
    assert found is not None
    assert set(some) <= set(found)
    assert all(word.startswith(typed) for word in found)


@pytest.mark.parametrize(
    ("before", "typed"),
    [
        (["init"], ""),
        (["doctor"], "x"),
        (["launch", "x"], "y"),
        (["launch"], "nothing.at."),
        (["generate", "a"], ""),
    ],
)
def test_nothing_where_nothing_fits(before: list[str], typed: str) -> None:
    assert complete_word(before, typed) == []


def test_groups_are_left_to_hydra() -> None:
    assert complete_word(["launch"], "model=ti") is None
    assert complete_word(["launch"], "mod") is None


def test_runs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs/smoke/20260102-030405-1a2b3c4d"
    run.mkdir(parents=True)
    (run / "manifest.json").write_text("{}")
    assert complete_word(["generate"], "runs/") == ["runs/smoke/20260102-030405-1a2b3c4d"]


def test_a_failure_prints_nothing_into_the_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(before: list[str], typed: str) -> list[str]:
        raise OSError(f"no folder for {before} {typed}")

    monkeypatch.setattr(completion, "complete_word", fail)
    monkeypatch.setenv("COMP_LINE", "caramba resume la")
    assert hydra_cli.run_native(parse_argv(["-sc", "query=bash"])) == 0
    assert capfd.readouterr() == ("", "")
