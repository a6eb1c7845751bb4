"""Runs of models with memory slots: resized between phases, measured while they train, restored with their size."""

from __future__ import annotations

from pathlib import Path

import pytest

import caramba
from caramba.artifacts.memory_slots import read_statistics
from caramba.errors import ConfigError
from caramba.model import load_pretrained
from caramba.model.memory import memory_layers
from tests.integration.commands import SMALL

pytestmark = pytest.mark.usefixtures("blank_figures")
WORDS = (
    *("model=tiny_memory", "train=pretrain", "train.steps=4", "train.batch_size=2", "train.block_size=48"),
    *("benchmark=none", "verify=none", "device=cpu", "settings.instrument=none", "train.num_workers=0"),
    *("settings.eval_iters=2", "trainer.limit_val_batches=1", "model.topology.layers.0.repeat=1", *SMALL),
)


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train.memory_resize={slots: 8}", "train.block_size=32"), "nothing leaves a window of 32"),
        (("train.memory_resize={slots: 8}", "model=tiny"), "no MemoryBankLayer"),
        (("train.memory_resize={slots: 0}",), "greater than 0"),
    ],
)
def test_what_cannot_be_resized_is_refused_before_training(words: tuple[str, ...], message: str) -> None:
    base = [
        word for word in WORDS if not word.startswith(("model", "train.block")) or "model=tiny" not in words
    ]
    with pytest.raises(ConfigError, match=message):
        caramba.compile([*base, *words])
