"""Documents kept apart through the real trainer: prepared text, two ways to pack it, and a kill in between."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from caramba.data import train_bpe, write_token_folder
from tests.integration.commands import caramba, interrupt_when, only_run
from tests.integration.test_resume import assert_same_weights

VOCAB = 400
WORDS = [
    *("experiment=smoke", "verify=none", "settings.instrument=none", "train.save_every=4"),
    *(f"model.embedder.vocab_size={VOCAB}", f"model.teacher.manifest.embedder.vocab_size={VOCAB}"),
    *("train.phases.pretrain.steps=12", "train.steps=null", "train.eval_every=8"),
    *(f"train.phases.{phase}.steps=4" for phase in ("blockwise", "drift", "global")),
    "trainer.limit_val_batches=2",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """Tokens of 300 short documents, made by the command."""
    place = tmp_path_factory.mktemp("text")
    for number in range(300):
        words = " ".join(f"w{(number * 7 + i) % 53}" for i in range(5 + number % 90))
        (place / f"{number:03d}.txt").write_text(f"document {number}: {words}\n")
    made = place / "tokens"
    words = [
        "prepare",
        "text",
        str(place),
        "--train-bpe",
        str(VOCAB),
        "--val-frac",
        "0.1",
        "--output",
        str(made),
    ]
    done = caramba(words, place, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    return made


@pytest.mark.parametrize("words", [["data.packing=best_fit"], ["data.document_mask=true"]])
def test_documents_kept_apart_train_and_resume_bit_equal(
    words: list[str], folder: Path, tmp_path: Path, cache: Path
) -> None:
    command = [*WORDS, "data=tokens", f"data.path={folder}", "model.surgery.calibration_tokens=4096", *words]
    first, second = tmp_path / "whole", tmp_path / "killed"
    first.mkdir()
    second.mkdir()
    done = caramba(command, first, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = only_run(first)
    status = interrupt_when("runs/*/*/checkpoints/pretrain.state.pt", command, second, cache, signal.SIGKILL)
    assert status == -signal.SIGKILL
    assert caramba(["resume", str(only_run(second))], second, cache).returncode == 0
    assert_same_weights(only_run(second), whole)

    path = json.loads((whole / "plan.json").read_text())["pretrain"]["decisions"]["documents"]
    assert path["value"] == "mask"
    assert path["reason"] == "variable-length attention is for CUDA, not for cpu"
    report = json.loads((whole / "artifacts/report.json").read_text())
    meta = json.loads((folder / "meta.json").read_text())
    assert report["labels"]["data"] == "tokens"
    assert "separate documents" in report["labels"]["packing"]
    pretrain = next(phase for phase in report["phases"] if phase["id"] == "pretrain")
    assert 0.8 * 12 * 2 * 64 < pretrain["tokens"] < 12 * 2 * 64, "padding and first tokens are no targets"
    row = report["metrics"]
    assert row["perplexity.student.bits_per_byte"]["value"] < 8
    assert row["perplexity.student.unique_tokens"]["value"] <= meta["splits"]["val"]["tokens"]


def test_a_prepared_folder_is_a_benchmark_of_its_own(folder: Path, tmp_path: Path, cache: Path) -> None:
    words = [*WORDS, "train=none", "model=tiny", "verify=none", "data=tokens", f"data.path={folder}"]
    words = [word for word in words if ".teacher." not in word and "train." not in word]
    dataset = "benchmark.benchmarks.0.config.dataset="
    done = caramba([*words, dataset + str(folder)], tmp_path, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((only_run(tmp_path) / "artifacts/report.json").read_text())
    assert report["metrics"]["perplexity.student.bits_per_byte"]["value"] > 0

    np.save(tmp_path / "other.npy", np.arange(VOCAB + 100, dtype=np.uint16))
    done = caramba([*words, f"{dataset}{tmp_path}/other.npy"], tmp_path, cache)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"tokens reach id {VOCAB + 99}, the model has vocab_size={VOCAB}" in done.stderr
    assert "benchmark 'perplexity'" in done.stderr


def test_a_flat_file_has_no_documents(tmp_path: Path, cache: Path) -> None:
    done = caramba(["data=tokens", "data.path=x.npy", "data.packing=best_fit"], tmp_path, cache)
    assert done.returncode == 2
    assert "path=x.npy is a flat file" in " ".join(done.stderr.split())


def test_calibration_text_that_is_held_out_too_is_refused_before_training(tmp_path: Path, cache: Path) -> None:
    texts = [
        f"document {number}: " + " ".join(f"w{i % 53}" for i in range(number, number + 99)) for number in range(90)
    ]
    splits = {"train": texts, "val": [f"other {text}" for text in texts[:40]] + texts[3:4]}
    write_token_folder(tmp_path / "tokens", splits, train_bpe(texts, VOCAB), {"corpus": "test"})
    words = [*WORDS, "data=tokens", f"data.path={tmp_path}/tokens", "data.packing=best_fit"]
    done = caramba(words, tmp_path, cache)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "is also in the evaluation split, at token" in done.stderr
    assert "pretrain of the teacher" not in done.stdout


def test_a_run_does_not_go_on_with_other_data(folder: Path, tmp_path: Path, cache: Path) -> None:
    data = tmp_path / "tokens"
    shutil.copytree(folder, data)
    command = [
        *("model=tiny", "train=pretrain", "benchmark=none", "verify=none", "settings.instrument=none"),
        *("data=tokens", f"data.path={data}", f"model.embedder.vocab_size={VOCAB}"),
        *("train.steps=24", "train.warmup_steps=0", "train.batch_size=2", "train.block_size=16"),
        "train.save_every=4",
    ]
    status = interrupt_when("runs/*/*/checkpoints/pretrain.state.pt", command, tmp_path, cache, signal.SIGKILL)
    assert status == -signal.SIGKILL
    run = only_run(tmp_path)
    state = (run / "checkpoints/pretrain.state.pt").read_bytes()
    kept, text = tmp_path / "kept", tmp_path / "other.txt"
    data.rename(kept)
    text.write_text("other words of the same vocabulary\n" * 400)
    words = ["prepare", "text", str(text), "--tokenizer", str(kept), "--output", str(data)]
    assert caramba(words, tmp_path, cache).returncode == 0
    for again in (["resume", str(run)], command):
        done = caramba(again, tmp_path, cache)
        assert done.returncode == 2, done.stdout + done.stderr
        assert "the data in" in done.stderr
        assert "have changed since this run began: SHA-256" in done.stderr
        assert "resume=never" in done.stderr
    assert (run / "checkpoints/pretrain.state.pt").read_bytes() == state, "nothing is lost"
    shutil.rmtree(data)
    kept.rename(data)
    meta = json.loads((data / "meta.json").read_text())
    meta["source"]["listing"] = "the same text, read from elsewhere"
    del meta["checksums"]
    (data / "checksums.json").unlink()
    (data / "meta.json").write_text(json.dumps(meta))
    done = caramba(["resume", str(run)], tmp_path, cache)
    assert done.returncode == 0, done.stderr
