"""Distillation from the command line: converged blocks, teacher outputs on disk, low-rank updates, averages, bfloat16."""

from __future__ import annotations

import csv
import json
import shutil
import signal
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from caramba.cli import main
from caramba.data.checkpoint import load_tensors
from caramba.distill import Objective
from caramba.experiment import stages
from caramba.experiment.objectives import build_objective
from tests.integration.commands import SMALL, SMALL_TEACHER, caramba, interrupt_when, only_run

SMOKE = ("experiment=smoke", "benchmark=none", "verify=none", *SMALL, *SMALL_TEACHER)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """Return a run that trained a teacher and transplanted a student."""
    folder = tmp_path_factory.mktemp("teacher")
    done = caramba([*SMOKE, "train.phases.pretrain.steps=30"], folder, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    return only_run(folder)


def words_of(teacher: Path, *words: str) -> list[str]:
    return [*SMOKE, f"model.teacher.checkpoint={teacher}", *words]


def launch(words: Sequence[str], folder: Path, cache: Path) -> tuple[Path, str]:
    done = caramba(words, folder, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    return only_run(folder), done.stdout


def stage(run: Path, name: str) -> dict[str, Any]:
    (file,) = run.glob(f"stages/*-{name}.json")
    phase = json.loads(file.read_text())["phase"]
    assert isinstance(phase, dict)
    return phase


def decisions(run: Path, name: str) -> dict[str, Any]:
    found = json.loads((run / "plan.json").read_text())[name]["decisions"]
    assert isinstance(found, dict)
    return found


def test_converged_blocks_end_the_phase_early_and_the_record_says_so(
    teacher: Path, tmp_path: Path, cache: Path
) -> None:
    words = (
        "train=blockwise",
        "train.steps=null",
        "train.phases.blockwise.steps=40",
        "train.phases.drift.steps=4",
    )
    limits = "+train.phases.blockwise.convergence={target: 0.0001, patience: 2, max_steps: 6}"
    run, printed = launch(words_of(teacher, *words, limits, "train.save_every=3"), tmp_path, cache)
    assert "blockwise: ended after 6 of 40 steps: every block has converged" in printed
    record = stage(run, "blockwise")
    assert (record["steps"], record["tokens"]) == (6, 6 * 2 * 64)
    assert record["details"]["steps_planned"] == 40
    blocks = record["details"]["blocks"]
    assert [(block["steps"], block["ended"]) for block in blocks.values()] == [(6, "max_steps")] * 4
    assert stage(run, "drift")["steps"] == 4, "the run goes on with the next phase"


def test_sequential_blocks_change_one_after_another(teacher: Path, tmp_path: Path, cache: Path) -> None:
    words = ("train=blockwise", "train.steps=8", "train.schedule=sequential", "train.attention_kl=0.1")
    run, _ = launch(words_of(teacher, *words), tmp_path, cache)
    blocks = stage(run, "blockwise")["details"]["blocks"]
    assert [block["steps"] for block in blocks.values()] == [2, 2, 2, 2]
    before = load_tensors(run / "checkpoints/transplant.safetensors")
    after = load_tensors(run / "checkpoints/blockwise.safetensors")
    for block in blocks:
        key = f"{block}.projection.c.weight"
        assert not torch.equal(before[key], after[key])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("train.phases.blockwise.schedule=sequential",),
            "schedule=sequential trains 4 blocks in turn, got steps=3; use steps=4 or more",
        ),
        (
            ("model.surgery.exact_first_tokens=64",),
            "calibration windows have 64 tokens, and exact_first_tokens=64 leaves none to measure",
        ),
        (("+train.phases.global.lora={targets: [k_sem]}",), "lora.targets: 'k_sem' names no linear layer"),
    ],
)
def test_what_a_later_phase_cannot_do_is_refused_before_the_teacher_trains(
    words: tuple[str, ...], message: str, tmp_path: Path, cache: Path
) -> None:
    refused = caramba([*SMOKE, *words], tmp_path, cache)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert message in refused.stderr
    assert not list(tmp_path.rglob("*.safetensors"))


def test_teacher_outputs_are_kept_reused_and_capped(teacher: Path, tmp_path: Path, cache: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(cache, home)
    phases = ("blockwise", "drift")
    cached = [f"train.phases.{phase}.cache_teacher_outputs=true" for phase in phases]
    folders = [tmp_path / name for name in ("plain", "first", "second", "capped")]
    for folder in folders:
        folder.mkdir()
    words = words_of(teacher, "train=blockwise")
    plain, _ = launch(words, folders[0], home)
    first, printed = launch([*words, *cached], folders[1], home)
    # 4 layers x 2 tensors x 64 tokens x 128 features x 4 bytes, 3 steps of 2 samples
    assert "blockwise: teacher outputs of 6 samples take 0.00 GB on disk" in printed
    stored = {file: file.stat().st_mtime_ns for file in home.rglob("*.targets")}
    assert len(stored) == 12, "two phases of six samples; the stream goes on, so none is read twice"
    assert {file.stat().st_size // 1000 for file in stored} == {262}
    second, _ = launch([*words, *cached], folders[2], home)
    assert {file: file.stat().st_mtime_ns for file in home.rglob("*.targets")} == stored
    for name in ("blockwise", "drift"):
        weights = [load_tensors(run / f"checkpoints/{name}.safetensors") for run in (plain, first, second)]
        for key, value in weights[0].items():
            torch.testing.assert_close(weights[1][key], value, rtol=1e-4, atol=1e-6)
            assert torch.equal(weights[1][key], weights[2][key])
    capped = caramba([*words, *cached, "train.teacher_cache_max_gb=0.001"], folders[3], home)
    assert capped.returncode == 2, capped.stdout + capped.stderr
    assert "over teacher_cache_max_gb=0.001" in capped.stderr
    assert not list(folders[3].rglob("*.safetensors")), "refused before anything is transplanted"


def test_stored_logits_low_rank_updates_and_an_average_survive_a_kill(
    teacher: Path, tmp_path: Path, cache: Path
) -> None:
    home = tmp_path / "home"
    shutil.copytree(cache, home)
    words = words_of(
        teacher,
        "train=finetune",
        "train.steps=12",
        "train.save_every=4",
        "train.phases.global.objective=mixed",
        "+train.phases.global.kl_weight=0.7",
        "+train.phases.global.temperature=2.0",
        f"+train.phases.global.teacher_logits={{path: {tmp_path / 'store'}, top_k: 64}}",
        "+train.phases.global.lora={rank: 2, dropout: 0.1}",
        "+train.phases.global.ema_decay=0.9",
        "+train.phases.global.vocab_chunk=50",
        *("settings.instrument=none", "settings.peak_tflops=1", "trainer.log_every_n_steps=2"),
    )
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    run, printed = launch(words, whole, home)
    assert "24 windows, 0 stored, 24 to write" in printed
    sizes = {file.stat().st_size for file in (tmp_path / "store").rglob("*.targets")}
    assert max(sizes) < 64 * (96 * 4 + 4) + 500, "16 bits an entry, 16 its index"
    status = interrupt_when("runs/*/*/checkpoints/global.state.pt", words, killed, home, signal.SIGKILL)
    assert status == -signal.SIGKILL
    done = caramba(["resume", str(only_run(killed))], killed, home)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "24 windows, 24 stored, 0 to write" in done.stdout
    other = caramba([*words, "train.phases.global.teacher_logits.top_k=32"], tmp_path, home)
    assert other.returncode == 2, other.stdout + other.stderr
    assert "top_k: stored 64, this run 32" in other.stderr
    ours = load_tensors(only_run(killed) / "checkpoints/global.safetensors")
    theirs = load_tensors(run / "checkpoints/global.safetensors")
    assert ours.keys() == theirs.keys() == load_tensors(run / "checkpoints/transplant.safetensors").keys()
    assert not [key for key in ours if not torch.equal(ours[key], theirs[key])]
    state = stage(run, "global")
    assert state["steps"] == 12
    rows = (run / "metrics.csv").read_text().splitlines()
    assert {"loss", "kl", "ce"} <= set(rows[0].split(","))
    # Where all logits are stored the teacher does not run, and its FLOPs are not among those of a token.
    assert work_of_a_token(only_run(killed)) < 0.9 * work_of_a_token(run)


def work_of_a_token(run: Path) -> float:
    """MFU over tokens/s of the last row that has both."""
    with (run / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["mfu"]]
    return float(rows[-1]["mfu"]) / float(rows[-1]["tokens_per_s"])


def test_blocks_in_turn_survive_a_kill_with_their_schedule(teacher: Path, tmp_path: Path, cache: Path) -> None:
    limits = "+train.phases.blockwise.convergence={target: 0.2, patience: 3, max_steps: 6}"
    words = words_of(
        teacher,
        *(
            "train=blockwise",
            "train.steps=20",
            "train.phases.drift.steps=4",
            "train.schedule=sequential",
            limits,
        ),
        *("train.save_every=5", "train.accumulate=2", "+train.phases.blockwise.attention_kl=0.1"),
        "settings.instrument=none",
    )
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    run, _ = launch(words, whole, cache)
    status = interrupt_when("runs/*/*/checkpoints/blockwise.state.pt", words, killed, cache, signal.SIGKILL)
    assert status == -signal.SIGKILL
    done = caramba(["resume", str(only_run(killed))], killed, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (stage(item, "blockwise") for item in (run, only_run(killed)))
    for item in (first, second):
        del item["details"]["measured"]  # speed and memory of this process
    assert first["details"] == second["details"]
    assert first["steps"] == second["steps"] == sum(b["steps"] for b in first["details"]["blocks"].values())
    for name in ("blockwise", "drift"):
        ours, theirs = (load_tensors(item / f"checkpoints/{name}.safetensors") for item in (run, only_run(killed)))
        assert not [key for key in ours if not torch.equal(ours[key], theirs[key])]


def losses_of(teacher: Path, folder: Path, cache: Path, *words: str) -> tuple[Path, list[float]]:
    phases = "+train.phases={global: {objective: kl, lr: auto}}"
    run, _ = launch(words_of(teacher, "train=blockwise", phases, *words), folder, cache)
    return run, [stage(run, phase)["loss"] for phase in ("blockwise", "drift", "global")]


@pytest.fixture(scope="module")
def plain_run(teacher: Path, tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Path, list[float]]:
    """A run in float32 without compiled code, and the losses of its phases."""
    return losses_of(teacher, tmp_path_factory.mktemp("plain"), cache)


def test_bfloat16_trains_over_float32_weights(
    teacher: Path, plain_run: tuple[Path, list[float]], tmp_path: Path, cache: Path
) -> None:
    run, plain = plain_run
    assert decisions(run, "global")["precision"]["value"] == "32-true"
    assert decisions(run, "blockwise")["lr"]["value"] == pytest.approx(3.2e-3)
    (tmp_path / "amp").mkdir()
    run, amp = losses_of(teacher, tmp_path / "amp", cache, "train.use_amp=true", "train.amp_dtype=bfloat16")
    assert decisions(run, "global")["precision"]["value"] == "bf16-mixed"
    weights = load_tensors(run / "checkpoints/global.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.float32}
    # Rounding turns the sign of small gradients, and AdamW's first steps are nearly signs: three of them, not more.
    assert amp == pytest.approx(plain, rel=0.15, abs=5e-3)
    assert amp != plain


@pytest.mark.usefixtures("blank_figures")
def test_a_phase_begins_without_what_the_last_one_held(
    teacher: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[weakref.ref[Objective]] = []
    alive: list[int] = []

    def build(*args: Any) -> Objective:
        alive.append(sum(objective() is not None for objective in seen))
        objective = build_objective(*args)
        seen.append(weakref.ref(objective))
        return objective

    monkeypatch.setattr(stages, "build_objective", build)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CARAMBA_HOME", str(cache))
    assert main(["launch", *words_of(teacher, "train=blockwise")]) == 0
    assert alive == [0, 0]


@pytest.mark.slow
def test_compiled_code_agrees(teacher: Path, plain_run: tuple[Path, list[float]], tmp_path: Path, cache: Path) -> None:
    _, plain = plain_run
    run, compiled = losses_of(teacher, tmp_path, cache, "train.compile=true")
    assert decisions(run, "global")["compile_model"]["value"] is True
    # Other roundings turn the sign of small gradients, and AdamW's first steps are nearly signs.
    assert compiled == pytest.approx(plain, rel=0.02)


@pytest.mark.slow
def test_code_of_inductor_agrees(tmp_path: Path, cache: Path) -> None:
    part = "{type: ResidualTopology, layers: [{type: RMSNormLayer, d_model: 128}, {type: SwiGLULayer, d_model: 128, d_ff: 64}]}"
    words = ("model=tiny", "train=pretrain", "benchmark=none", "verify=none", *SMALL, f"model.topology.layers=[{part}]")
    words += ("train.steps=3", "train.batch_size=2", "train.block_size=64", "settings.instrument=none")
    losses = []
    for is_compiled in ("false", "true"):
        folder = tmp_path / is_compiled
        folder.mkdir()
        run, _ = launch([*words, f"train.compile={is_compiled}"], folder, cache)
        losses.append(stage(run, "pretrain")["loss"])
    assert decisions(run, "pretrain")["compile_model"]["value"] is True
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.surgery.kv_budget_bytes=10"], "the nearest possible is 24"),
        (["model.surgery.kv_budget_bytes=200", "model.surgery.method=weight_svd"], "measured error of method: dba"),
        (["model.topology.layers.0.layers.1.layers.1.d_ff=256"], "outside attention a student's layers"),
    ],
)  # fmt: skip
def test_a_teacher_that_only_its_run_describes_is_checked_before_any_work(
    words: list[str], message: str, teacher: Path, tmp_path: Path, cache: Path
) -> None:
    manifest = ["model.teacher.manifest=null", "train=blockwise"]
    common = [word for word in SMOKE if "teacher" not in word]
    done = caramba([*common, *manifest, f"model.teacher.checkpoint={teacher}", *words], tmp_path, cache)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in " ".join((done.stdout + done.stderr).split())
    assert "calibration:" not in done.stdout
