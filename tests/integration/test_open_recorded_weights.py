"""Opening a run takes the weights that its record names, whatever times and neighbours its files have."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from caramba.data.checkpoint.locate import find_checkpoint
from caramba.errors import CheckpointError
from caramba.model import load_pretrained, save_model
from caramba.runs.events import PHASE_FINISHED, append_event
from tests.integration.export.samples import GQA, loud, make_run, transformer


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with three recorded stages: a student, the same student trained on, and a control."""
    run = make_run(tmp_path, loud(transformer(GQA), seed=1))
    (run / "stages").mkdir()
    stages = [("transplant", "student", 1), ("global", "student", 2), ("teacher_continued", "control", 3)]
    for number, (name, role, seed) in enumerate(stages):
        file = run / "checkpoints" / f"{name}.safetensors"
        save_model(loud(transformer(GQA), seed=seed), file, role=role, phase=name, labels={})
        record = {"phase": {"id": name, "trains": role, "checkpoint": f"checkpoints/{name}.safetensors"}}
        (run / "stages" / f"{number:02d}-{name}.json").write_text(json.dumps(record))
    last = {"phase": {"id": "final", "trains": "none", "checkpoint": ""}}
    (run / "stages" / "03-final.json").write_text(json.dumps(last))
    (run / "checkpoints/pretrain.safetensors").unlink()
    return run


def test_find_checkpoint_ignores_times_and_unrecorded_files(run: Path, tmp_path: Path) -> None:
    stray = run / "checkpoints/zz_newest.safetensors"
    save_model(loud(transformer(GQA), seed=9), stray, role="student", phase="x", labels={})
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    for order in ((1, 2, 3, 4), (4, 3, 2, 1), (2, 2, 2, 2)):
        for time, file in zip(order, sorted((copy / "checkpoints").glob("*.safetensors")), strict=True):
            os.utime(file, (time, time))
        assert find_checkpoint(copy, role="student") == copy / "checkpoints/global.safetensors"
    model, _ = load_pretrained(find_checkpoint(copy, role="student"))
    expected = loud(transformer(GQA), seed=2).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_find_checkpoint_refuses_a_missing_recorded_file(run: Path) -> None:
    (run / "checkpoints/transplant.safetensors").unlink()  # not the one that is opened
    assert find_checkpoint(run, role="student").name == "global.safetensors"
    (run / "checkpoints/global.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"global\.safetensors: missing, and the run's record names it"):
        find_checkpoint(run, role="student")


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}, {"format": "caramba-9", "role": "student"}])
def test_find_checkpoint_refuses_a_foreign_file(run: Path, metadata: dict[str, str]) -> None:
    from caramba.data.checkpoint import save_tensors

    save_tensors(run / "checkpoints/global.safetensors", {"x": torch.zeros(2)}, metadata)
    with pytest.raises(CheckpointError, match=r"global\.safetensors: its header has format="):
        find_checkpoint(run, role="student")


def test_find_checkpoint_refuses_swapped_files_of_one_role(run: Path) -> None:
    one, other = run / "checkpoints/global.safetensors", run / "checkpoints/transplant.safetensors"
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    (run / "checksums.json").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match="phase='transplant', expected"):
        find_checkpoint(run, role="student")


def test_find_checkpoint_refuses_to_choose_between_two_exports(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for name in ("model.safetensors", "model.ckpt"):
        (tmp_path / "out" / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors and model\.ckpt; name the file"):
        find_checkpoint(tmp_path / "out", role="student")


@pytest.mark.parametrize("text", ["{", "[]", '{"phase": 3}', '{"phase": {"id": "x"}}'])
def test_find_checkpoint_refuses_a_damaged_record(run: Path, text: str) -> None:
    (run / "stages/01-global.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"01-global\.json: cannot be read as the record of a stage"):
        find_checkpoint(run, role="student")


def test_find_checkpoint_refuses_a_record_that_leaves_the_run(run: Path) -> None:
    record = {"phase": {"id": "global", "trains": "student", "checkpoint": "../other.safetensors"}}
    (run / "stages/01-global.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="expected a file inside the run"):
        find_checkpoint(run, role="student")


@pytest.mark.parametrize("is_all", [True, False])
def test_find_checkpoint_refuses_an_earlier_phase_where_events_name_a_later_one(run: Path, is_all: bool) -> None:
    """Its record, the sums and its weights are removed, or all records."""
    for phase in ("transplant", "global"):
        append_event(run, PHASE_FINISHED, phase=phase, steps=1, seconds=1.0, loss=2.0)
    (run / "checksums.json").unlink(missing_ok=True)
    (run / "checkpoints/global.safetensors").unlink()
    if is_all:
        shutil.rmtree(run / "stages")
    else:
        (run / "stages/01-global.json").unlink()
    with pytest.raises(CheckpointError, match=r"no record of phase global, which events\.jsonl has as finished"):
        find_checkpoint(run, role="student")


def test_find_checkpoint_without_records_refuses_to_choose(run: Path) -> None:
    shutil.rmtree(run / "stages")
    with pytest.raises(CheckpointError, match="no record of its stages and several checkpoints"):
        find_checkpoint(run, role="student")
