"""Checks of models as they are, in a run that trains nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from caramba.config.manifest import GroupConfig
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
    assert verdict["checks"][0]["name"] == "delta_nll"
    if status:
        assert "verify fidelity after look: delta_nll=" in done.stderr
        again = caramba(["resume", str(run)], tmp_path / "here", cache)
        assert (again.returncode, len(list((run / "stages").iterdir()))) == (1, 1)


@pytest.mark.parametrize("name", ["final", "transplant", "verify"])
def test_a_run_may_not_take_the_name_of_a_stage(name: str) -> None:
    group: dict[str, Any] = {
        "name": "g",
        "data": {"type": "stdlib", "tokenizer": "byte"},
        "runs": [{"id": name}],
    }
    with pytest.raises(ValueError, match=f"'{name}', which is a stage of every run's own; call it otherwise"):
        GroupConfig.model_validate(group)
