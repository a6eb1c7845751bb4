"""More CPU threads than usable cores: said by the plan and by a launch, with the setting that fits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from caramba.cli import main
from caramba.launch import preflight
from caramba.launch.freeze import freeze
from caramba.launch.preflight import available_cores, note_on_threads, usable_cores

WORDS = ["model=tiny", "train=pretrain"]


@pytest.fixture(autouse=True)
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "available_cores", lambda: 4)


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000", 4), ("150000 100000", 2), ("50000 100000", 1), ("800000 100000", 4), ("damaged", 4)],
)
def test_a_quota_limits_the_cores(tmp_path: Path, text: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert usable_cores(tmp_path / "cpu.max") == cores
    assert usable_cores(tmp_path / "none") == 4


@pytest.mark.parametrize(
    ("words", "variables", "note"),
    [
        ([], {}, None),
        ([], {"OMP_NUM_THREADS": "4"}, None),
        ([], {"OMP_NUM_THREADS": "16"}, "16 threads on 4 usable cores .*set OMP_NUM_THREADS=4"),
        (
            ["launcher=process", "launcher.n_jobs=4", "launcher.threads=2"],
            {},
            "4 workers with 2 threads each on 4 usable cores .*set launcher.threads=1",
        ),
        (["launcher=process", "launcher.n_jobs=2", "launcher.threads=2"], {}, None),
        (["launcher=slurm", "launcher.threads=64"], {"OMP_NUM_THREADS": "64"}, None),
    ],
)
def test_too_many_threads_are_told(words: list[str], variables: dict[str, str], note: str | None) -> None:
    found = note_on_threads(freeze([*WORDS, *words]).manifest, variables)
    assert (found is None) == (note is None)
    assert note is None or re.search(note, str(found))


def test_the_plan_has_the_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", str(available_cores() + 60))
    assert main(["compile", *WORDS]) == 0
    assert "note: " in (out := capsys.readouterr().out)
    assert "set OMP_NUM_THREADS=4" in out
