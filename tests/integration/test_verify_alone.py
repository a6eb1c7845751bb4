"""Checks of models as they are, in a run that trains nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from caramba import worker
from caramba.config.benchmark import BenchmarkConfig
from caramba.config.manifest import GroupConfig
from caramba.evaluation import Subjects, suite
from caramba.runs.files import remove_recorded
from caramba.runs.state import run_state
from tests.integration.commands import caramba, only_run
from tests.integration.export.samples import DBA, GQA, loud, make_run, transformer


def written(folder: Path, bound: float) -> Path:
    """Write a manifest that compares two trained models and trains neither, and return its file."""
    student = make_run(folder / "a", loud(transformer(DBA)))
    teacher = make_run(folder / "b", loud(transformer(GQA)), role="teacher")
    model = json.loads((student / "manifest.json").read_text())["model"]
    model |= {"checkpoint": str(student), "teacher": {"checkpoint": str(teacher)}}
    check = {"type": "fidelity", "block_size": 16, "batches": 2, "max_delta_nll": bound, "fail_fast": True}
    manifest = {
        "name": "alone",
        "model": model,
        "groups": [
            {
                "name": "main",
                "data": {"type": "tokens", "path": str(folder / "a" / "tokens")},
                "runs": [{"id": "look", "verify": [check]}],
            }
        ],
    }
    (folder / "manifest.yaml").write_text(yaml.safe_dump(manifest))
    return folder / "manifest.yaml"


@pytest.mark.parametrize(("bound", "status"), [(1e6, 0), (-1e6, 1)])
def test_a_run_without_training_is_verified(bound: float, status: int, tmp_path: Path, cache: Path) -> None:
    file = written(tmp_path, bound)
    (tmp_path / "here").mkdir()
    done = caramba(["run", str(file)], tmp_path / "here", cache)
    assert done.returncode == status, done.stderr
    run = only_run(tmp_path / "here")
    (verdict,) = json.loads((run / "result.json").read_text())["verdicts"]
    assert (verdict["run_id"], verdict["type"]) == ("look", "fidelity")
    assert "delta_nll" in [check["name"] for check in verdict["checks"]]
    if status:
        assert "verify fidelity after look: delta_nll=" in done.stderr
        again = caramba(["resume", str(run)], tmp_path / "here", cache)
        assert (again.returncode, len(list((run / "stages").iterdir()))) == (1, 1)


def test_a_benchmark_that_failed_is_run_again_by_a_resume_and_no_other_is(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, 1e6)
    manifest = yaml.safe_load(file.read_text())
    manifest["groups"][0]["benchmarks"] = [
        {"id": name, "config": {"type": "perplexity", "block_size": 16, "num_batches": 1, "batch_size": 2}}
        for name in ("first", "second")
    ]
    file.write_text(yaml.safe_dump(manifest))
    (tmp_path / "here").mkdir()
    assert caramba(["run", str(file)], tmp_path / "here", cache).returncode == 0
    run = only_run(tmp_path / "here")
    (stage,) = run.glob("stages/*-final.json")
    whole = json.loads(stage.read_text())["benchmarks"]
    remove_recorded(stage)

    dispatch = suite._dispatch

    def short_of_memory(bench: BenchmarkConfig, subjects: Subjects) -> Any:
        if bench.id == "second":
            raise RuntimeError("no memory left")
        return dispatch(bench, subjects)

    monkeypatch.setenv("CARAMBA_HOME", str(cache))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite, "_dispatch", short_of_memory)
        assert worker.run(run) == 1
    assert f"to try second again: caramba resume {run}" in capsys.readouterr().err
    assert run_state(run).state == "failed"
    assert json.loads((run / "result.json").read_text())["status"] == "failed"
    (stage,) = run.glob("stages/*-final.json")
    record = json.loads(stage.read_text())
    record["benchmarks"][0]["seconds"] = 12345.0
    # Whatever number it has: someone may have taken a stage away.
    remove_recorded(stage)
    stage = stage.with_name("09-final.json")
    stage.write_text(json.dumps(record))
    (run / "result.json").rename(run / "kept.json")

    again = caramba(["resume", str(run)], tmp_path / "here", cache)
    assert again.returncode == 0, again.stderr
    assert [file.name for file in run.glob("stages/*-final.json")] == [stage.name]
    first, second = json.loads(stage.read_text())["benchmarks"]
    assert first["seconds"] == 12345.0, "what was measured is not measured again"
    assert second["error"] is None
    assert second["metrics"] == whole[1]["metrics"]
    assert run_state(run).state == "finished"


@pytest.mark.parametrize("name", ["final", "transplant", "verify"])
def test_a_run_may_not_take_the_name_of_a_stage(name: str) -> None:
    group: dict[str, Any] = {
        "name": "g",
        "data": {"type": "stdlib", "tokenizer": "byte"},
        "runs": [{"id": name}],
    }
    with pytest.raises(ValueError, match=f"'{name}', which is a stage of every run's own; call it otherwise"):
        GroupConfig.model_validate(group)
