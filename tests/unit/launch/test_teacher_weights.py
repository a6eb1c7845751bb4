"""Weights that a launch needs are looked for before anything starts."""

# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

import json

import pytest

from caramba.errors import CheckpointError
from caramba.export.llama import llama_config
from caramba.launch.freeze import freeze
from caramba.launch.preflight import check_weights
from caramba.model import build_model, save_model

pytestmark = pytest.mark.usefixtures("empty_folder")


def checked(*words):
    return check_weights(freeze(list(words)).manifest)


def write_teacher(file):
    """Write weights of the network that the default manifest describes as its teacher."""
    teacher = freeze(["train=blockwise"]).manifest.model.teacher.manifest
    save_model(build_model(teacher), file, role="teacher", phase="global", labels={})


def test_llama_without_weights_names_three_ways_on():
    with pytest.raises(CheckpointError) as caught:
        checked("model=llama32_dba", "train=blockwise")
    text = str(caught.value)
    for way in ("hf auth login", "model.teacher.checkpoint=DIR", "model=tiny_dba", "meta-llama/Llama-3.2-1B"):
        assert way in text


def test_llama_in_the_hub_cache_without_all_its_files_is_not_there(tmp_path):
    snapshot = tmp_path / "hf" / "hub" / "models--meta-llama--Llama-3.2-1B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"not in this machine's Hugging Face cache .*HF_HUB_OFFLINE"):
        checked("model=llama32_dba", "train=blockwise")
    spec = freeze(["model=llama32_dba", "train=blockwise"]).manifest.model.teacher.manifest
    config = llama_config(spec, max_positions=None, eos_id=None, dtype="float32")
    (snapshot / "config.json").write_text(json.dumps(config))
    manifest = checked("model=llama32_dba", "train=blockwise")
    assert manifest.model.teacher.checkpoint == str(snapshot)


def test_a_student_phase_needs_teacher_weights():
    with pytest.raises(CheckpointError, match=r"run 'blockwise' needs the teacher's weights[\s\S]*train=upcycle"):
        checked("train=blockwise")
    checked("train=upcycle")
    checked("train=pretrain")


def test_checkpoints_are_found_and_made_absolute(tmp_path):
    write_teacher(tmp_path / "w.safetensors")
    manifest = checked("train=blockwise", "model.teacher.checkpoint=w.safetensors")
    assert manifest.model.teacher.checkpoint == str(tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="no such file"):
        checked("train=blockwise", "model.teacher.checkpoint=v.safetensors")
    run = tmp_path / "runs" / "a" / "20260101-000000-00000000"
    run.mkdir(parents=True)
    (run / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no finished checkpoint"):
        checked("train=blockwise", "model.teacher.checkpoint=runs/a")
    (run / "checkpoints").mkdir()
    write_teacher(run / "checkpoints" / "global.safetensors")
    manifest = checked("train=blockwise", "model.teacher.checkpoint=runs/a")
    assert manifest.model.teacher.checkpoint == str(run)


def test_weights_of_another_network_are_refused_before_anything_starts(tmp_path):
    file = tmp_path / "w.safetensors"
    write_teacher(file)
    checked("train=blockwise", f"model.teacher.checkpoint={file}")
    for words in (
        (
            "train=blockwise",
            f"model.teacher.checkpoint={file}",
            "model.embedder.vocab_size=77",
            "model.teacher.manifest.embedder.vocab_size=77",
        ),
        ("model=tiny", "train=none", f"model.checkpoint={file}", "model.embedder.vocab_size=77"),
    ):
        with pytest.raises(CheckpointError, match="holds another network than the manifest describes"):
            checked(*words)


def test_a_damaged_file_of_weights_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "w.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"w\.safetensors: the file is truncated: 1 bytes"):
        checked("train=blockwise", "model.teacher.checkpoint=w.safetensors")
