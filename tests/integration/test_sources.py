"""A teacher or a text that changes while a run is interrupted: what is on record came from the former."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

import transformers

from caramba.data.checkpoint import load_tensors, save_tensors
from caramba.data.checkpoint.folder import SAMPLE_BYTES, WHOLE_BYTES, fingerprint
from tests.integration.commands import caramba, interrupt_when, only_run

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 61}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def words(teacher: Path, tokens: Path) -> list[str]:
    return [
        *("launch", "model=hf_dba", f"model.teacher.checkpoint={teacher}", "train=blockwise", "device=cpu"),
        *("data=tokens", f"data.path={tokens}", "benchmark=none", "verify=none", "train.block_size=32"),
        *("train.batch_size=2", "train.steps=8", "train.save_every=2", "train.warmup_steps=1"),
        *("model.surgery.calibration_tokens=512", "settings.instrument=none"),
    ]


def test_a_teacher_or_text_that_changed_in_between_is_refused_and_nothing_is_lost(tmp_path: Path, cache: Path) -> None:
    """Trap: the signature of a folder is that of its headers, and of a run's weights and of the text there was none."""
    teacher, tokens = tmp_path / "teacher", tmp_path / "text.npy"
    transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(SHAPE | HEADS)).save_pretrained(teacher)
    draw = np.random.default_rng(0)
    text, other = (draw.integers(0, 61, 4000).astype(np.uint16) for _ in range(2))
    np.save(tokens, text)
    command = words(teacher, tokens)
    interrupt_when("runs/*/*/checkpoints/blockwise.state.pt", command, tmp_path, cache, signal.SIGKILL)
    run = only_run(tmp_path)
    weights = teacher / "model.safetensors"
    kept = weights.read_bytes()
    state = (run / "checkpoints" / "blockwise.state.pt").read_bytes()

    tensors = load_tensors(weights)
    save_tensors(weights, {name: tensor * 1.5 for name, tensor in tensors.items()}, {"format": "pt"})
    for again in (["resume", str(run)], command):
        refused = caramba(again, tmp_path, cache)
        assert refused.returncode == 2, refused.stdout + refused.stderr
        assert "the teacher's weights" in refused.stderr
        assert "have changed since this run began" in refused.stderr
    weights.write_bytes(kept)

    np.save(tokens, other)
    refused = caramba(["resume", str(run)], tmp_path, cache)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "the data in" in refused.stderr
    assert (run / "checkpoints" / "blockwise.state.pt").read_bytes() == state
    np.save(tokens, text)

    done = caramba(["resume", str(run)], tmp_path, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    assert only_run(tmp_path) == run


def test_the_fingerprint_of_a_large_file_sees_a_changed_matrix(tmp_path: Path) -> None:
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for file in (first, second):
        with open(file, "wb") as stream:
            stream.truncate(2 * WHOLE_BYTES)
    assert fingerprint(first) == fingerprint(second)
    with open(second, "r+b") as stream:
        stream.seek(WHOLE_BYTES)
        stream.write(os.urandom(40 * SAMPLE_BYTES))
    assert fingerprint(first) != fingerprint(second)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_teacher_with_values_that_are_not_finite_is_refused_before_surgery(
    tmp_path: Path, cache: Path, bad: float
) -> None:
    """Trap: without calibration the student, the learning rate, an eigensolver or JSON was blamed, with status 1."""
    teacher, tokens = tmp_path / "teacher", tmp_path / "text.npy"
    transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(SHAPE | HEADS)).save_pretrained(teacher)
    tensors = load_tensors(teacher / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = bad
    save_tensors(teacher / "model.safetensors", tensors, {"format": "pt"})
    np.save(tokens, np.random.default_rng(0).integers(0, 61, 4000).astype(np.uint16))
    done = caramba([*words(teacher, tokens), "model.surgery.method=random"], tmp_path, cache)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"model.teacher.checkpoint={teacher}: values that are not finite" in done.stderr
    assert "model.safetensors: model.layers.1.mlp.down_proj.weight (1 of 6,144 values)" in done.stderr
