"""`caramba init`: the project that it writes passes its own test, plans and trains; an existing file is never replaced."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import caramba
from caramba.cli import main
from caramba.config.plugins import activate
from tests.integration.commands import caramba as command


@pytest.fixture(name="project")
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine"]) == 0
    return tmp_path / "mine"


def test_its_own_test_passes(project: Path, cache: Path) -> None:
    done = command(["-q", "-p", "no:cacheprovider"], project, cache, module="pytest")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


@pytest.mark.usefixtures("blank_figures")
def test_it_trains(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", sys.path[:])
    small = ["train.steps=3", "data.max_bytes=400000", "device=cpu", "benchmark=none"]
    try:
        run = caramba.launch(["experiment=mine", *small], config_dirs=["conf"], quiet=True)
        assert run.state == "finished"
        assert "ScaleLayer" in run.manifest.model_dump_json()
    finally:
        activate(())
        for name in ("my_layers", "my_modules"):
            sys.modules.pop(name, None)


def test_nothing_is_replaced(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("my_modules.py", "test_project.py", "experiment.yaml"):
        (project / name).unlink()
    (project / "my_layers.py").write_text("mine")
    assert main(["init", "mine"]) == 2
    assert "my_layers.py" in capsys.readouterr().err
    assert (project / "my_layers.py").read_text() == "mine"
    assert not (project / "my_modules.py").exists()
    assert main(["init"]) == 2
    assert main(["init", "mine/my_layers.py"]) == 2
