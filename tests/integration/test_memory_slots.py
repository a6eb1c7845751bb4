"""Runs of models with memory slots: resized between phases, measured while they train, restored with their size."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor

import caramba
from caramba.artifacts.training_curves import read_statistics
from caramba.data.checkpoint import load_tensors
from caramba.errors import ConfigError
from caramba.model import load_pretrained
from caramba.model.memory import memory_layers
from tests.integration.commands import SMALL, interrupt_when, only_run
from tests.integration.commands import caramba as run_command

pytestmark = pytest.mark.usefixtures("blank_figures")
WORDS = (
    *("model=tiny_memory", "train=pretrain", "train.steps=4", "train.batch_size=2", "train.block_size=48"),
    *("benchmark=none", "verify=none", "device=cpu", "settings.instrument=none", "train.num_workers=0"),
    *("settings.eval_iters=2", "trainer.limit_val_batches=1", "model.topology.layers.0.repeat=1", *SMALL),
)
RESIZED = ("launch", *WORDS, "train.memory_resize={slots: 8}", "train.save_every=2", "train.compile=false")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("slots", "is_open"), [(8, False), (40, True)])
def test_a_phase_trains_the_slots_that_it_asks_for(slots: int, is_open: bool) -> None:
    resize = f"train.memory_resize={{slots: {slots}, select: read_mass, open: {str(is_open).lower()}}}"
    run = caramba.launch([*WORDS, resize], quiet=True)
    checkpoint = run.path / run.report["phases"][-1]["checkpoint"]
    model, _ = load_pretrained(checkpoint)
    assert [layer.config.slots for layer in memory_layers(model).values()] == [slots]
    assert [layer.slot_gate.shape[1] for layer in memory_layers(model).values()] == [slots]
    rows = [row for row in run.history("pretrain") if row.get("memory_utilization")]
    assert [row["step"] for row in rows] == [2, 4]
    assert all(0 <= row[f"memory_{key}"] <= 1 for row in rows for key in ("dead_share", "mass", "write_rate"))
    lines, read_mass = read_statistics(run.path)
    assert [step for step, _ in lines["memory_mass"]] == [2, 4]
    assert [len(head) for head in read_mass] == [slots, slots]
    assert (run.path / "artifacts" / "memory_slots.png").is_file()


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A run of one process that resizes its slots before it trains."""
    return trained(tmp_path_factory.mktemp("resized"), cache)


def trained(folder: Path, cache: Path, *more: str) -> Path:
    done = run_command([*RESIZED, *more], folder, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    return only_run(folder)


def weights(run: Path) -> dict[str, Tensor]:
    found = load_tensors(run / "checkpoints" / "pretrain.safetensors")
    gates = [x.shape[1] for name, x in found.items() if name.endswith("slot_gate")]
    assert gates == [8]
    return found


def test_a_resized_run_that_was_killed_and_resumed_is_bit_equal(resized: Path, tmp_path: Path, cache: Path) -> None:
    state = "runs/*/*/checkpoints/pretrain.state.pt"
    assert interrupt_when(state, RESIZED, tmp_path, cache, signal.SIGKILL) == -signal.SIGKILL
    run = only_run(tmp_path)
    assert not (run / "checkpoints" / "pretrain.safetensors").exists()
    done = run_command(["resume", str(run)], tmp_path, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = weights(run), weights(resized)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], x) for name, x in theirs.items())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_resize_and_train_as_one_process(resized: Path, tmp_path: Path, cache: Path, strategy: str) -> None:
    words = ("train.batch_size=1", f"parallel={strategy}", "parallel.dp=2", "launcher=torchrun")
    ours, theirs = weights(trained(tmp_path, cache, *words)), weights(resized)
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        torch.testing.assert_close(ours[name], x, rtol=0, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train.memory_resize={slots: 8}", "train.block_size=32"), "nothing leaves a window of 32"),
        (("train.memory_resize={slots: 8}", "model=tiny"), "no MemoryBankLayer"),
        (("train.memory_resize={slots: 0}",), "greater than 0"),
    ],
)
def test_what_cannot_be_resized_is_refused_before_training(words: tuple[str, ...], message: str) -> None:
    base = [word for word in WORDS if not word.startswith(("model", "train.block")) or "model=tiny" not in words]
    with pytest.raises(ConfigError, match=message):
        caramba.compile([*base, *words])
