"""benchmark=controls from the command line: every control beside the student, distilled too, and a kill among them."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path

import pytest

from caramba.data.checkpoint import load_tensors
from tests.integration.commands import SMALL, SMALL_TEACHER, caramba, interrupt_when, only_run

CONFIG = "benchmark.benchmarks.0.config"
WORDS = [
    *("benchmark=controls", f"{CONFIG}.num_batches=1", f"{CONFIG}.block_size=64", "verify=none"),
    *("train.steps=3", "train.batch_size=2", "train.block_size=64", "train.phases.pretrain.steps=20"),
    *("settings.instrument=none", *SMALL, *SMALL_TEACHER),
    # What is measured beside the controls takes longer than they do.
    *(f"benchmark.benchmarks.1.config.{size}" for size in ("num_batches=1", "batch_size=2")),
    *("benchmark.benchmarks.2.config.sequence_lengths=[64]", f"{CONFIG}.batch_size=4"),
]
PHASES = ("blockwise", "drift", "global")


def rows_of(run: Path) -> dict[str, dict[str, str]]:
    with open(run / "artifacts/controls.csv") as lines:
        return {row["model"]: row for row in csv.DictReader(lines)}


def test_controls_are_distilled_measured_and_survive_a_kill(tmp_path: Path, cache: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    words = [*WORDS, f"{CONFIG}.distil=true", f"{CONFIG}.controls=[copy,weight_svd,teacher_continued]"]
    done = caramba(words, whole, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    run = only_run(whole)
    rows = rows_of(run)
    students = [name + end for name in ("copy", "weight_svd") for end in ("", "_distilled")]
    caches = ["teacher_q8_0", "teacher_q4_0"]
    assert list(rows) == ["teacher", "student_transplant", "student", *students, "teacher_continued", *caches]
    assert [float(rows[name]["kv_bytes_per_token"]) for name in caches] == [544, 288]
    assert rows["teacher_q4_0"]["nll"] != rows["teacher"]["nll"]
    # 4 layers at 16 bits: the teacher caches 128 elements, one head of two 64, the student 32.
    sizes = {name: float(row["kv_bytes_per_token"]) for name, row in rows.items()}
    assert (sizes["teacher"], sizes["copy"], sizes["student"], sizes["weight_svd"]) == (1024, 512, 256, 256)
    assert {row["tokens"] for name, row in rows.items() if name.endswith("distilled")} == {
        rows["student"]["tokens"],
        rows["teacher_continued"]["tokens"],
    }, "the same tokens"
    assert float(rows["teacher"]["ppl_ratio"]) == 1.0
    assert float(rows["copy"]["kl"]) > float(rows["student_transplant"]["kl"]) > 0
    report = json.loads((run / "artifacts/report.json").read_text())
    assert report["metrics"]["controls.copy.ppl_ratio"]["value"] == float(rows["copy"]["ppl_ratio"])
    assert "controls.png" in {item["path"] for item in report["artifacts"]}
    assert "caramba-controls" in (run / "artifacts/tables.tex").read_text()
    for name in PHASES:
        theirs = load_tensors(run / f"checkpoints/{name}.safetensors")
        ours = load_tensors(run / f"checkpoints/controls.weight_svd.{name}.safetensors")
        assert ours.keys() == theirs.keys()

    marker = "runs/*/*/checkpoints/controls.weight_svd.drift.safetensors"
    assert interrupt_when(marker, words, killed, cache, signal.SIGKILL) == -signal.SIGKILL
    again = caramba(["resume", str(only_run(killed))], killed, cache)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "controls.copy" not in again.stdout, "a finished control is not repeated"
    assert rows_of(only_run(killed)) == rows


def test_impossible_controls_are_rows_with_the_reason(tmp_path: Path, cache: Path) -> None:
    # A student nearly as wide as its teacher, and no phase that trains the teacher further.
    widths = ("model.surgery.sem_dim=32", "model.surgery.geo_dim=24", "model.surgery.v_dim=64")
    words = [
        "model=tiny_dba_per_head",
        *WORDS,
        *widths,
        f"{CONFIG}.cache_kinds=[bf16]",
        "~train.phases.teacher_continued",
    ]
    done = caramba(words, tmp_path, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    run = only_run(tmp_path)
    rows = rows_of(run)
    assert "no head is pooled; the next possible is 256" in rows["copy"]["skipped"]
    omitted = {
        item["name"]: item["reason"] for item in json.loads((run / "artifacts/report.json").read_text())["omitted"]
    }
    assert omitted["controls: copy"] == rows["copy"]["skipped"]
    assert "add a phase with control: true" in rows["teacher_continued"]["skipped"]
    cached = rows["teacher_bf16"]
    assert (float(cached["kv_ratio"]), cached["skipped"]) == (1.0, "")
    assert abs(float(cached["kl"])) < 1e-3
    assert rows["weight_svd"]["skipped"] == "" != rows["random"]["kl"]


@pytest.mark.parametrize("words", [("model=tiny", "train=pretrain")])
def test_controls_need_a_teacher(words: tuple[str, ...], tmp_path: Path, cache: Path) -> None:
    done = caramba(["benchmark=controls", "verify=none", *words], tmp_path, cache)
    assert done.returncode == 2
    assert "benchmark 'controls': controls are made from a teacher" in done.stderr
