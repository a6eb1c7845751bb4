from __future__ import annotations

import os
import pickle
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from caramba.data.checkpoint import load_training_state, save_training_state
from caramba.errors import CheckpointError
from tests.unit.data.checkpoint.test_tensors import file_size_limit


def test_training_goes_on_bit_equal(tmp_path: Path) -> None:
    def start() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
            scheduler.step()

    model, optimizer, scheduler = start()
    train(model, optimizer, scheduler, 3)
    save_training_state(
        tmp_path / "x.state",
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": dict(scheduler.state_dict()),
            "random": torch.get_rng_state(),
            "step": 3,
            "note": None,
        },
    )
    train(model, optimizer, scheduler, 3)

    other, other_optimizer, other_scheduler = start()
    state = load_training_state(tmp_path / "x.state")
    assert (state["step"], state["note"]) == (3, None)
    other.load_state_dict(state["model"])
    other_optimizer.load_state_dict(state["optimizer"])
    other_scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["random"])
    train(other, other_optimizer, other_scheduler, 3)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_plain_values_come_back_as_they_were(tmp_path: Path) -> None:
    state = {
        "a": [1, 2.5, True, None, "ü", b"\x00", (1, (2,))],
        3: OrderedDict(x=torch.arange(3)),
        "d": torch.bfloat16,
        "e": torch.device("cpu"),
        "s": torch.Size([1, 2]),
    }
    save_training_state(tmp_path / "x.state", state)
    loaded = load_training_state(tmp_path / "x.state")
    assert torch.equal(loaded[3].pop("x"), state[3].pop("x"))
    assert loaded == state


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"opt": [{"lr": np.float64(1)}]}, r"state\['opt'\]\[0\]\['lr'\] is numpy\.float64"),
        ({"rng": np.zeros(3)}, r"state\['rng'\] is numpy\.ndarray"),
        ({"path": Path("x")}, "without running code"),
        ({"c": Counter("aab")}, r"state\['c'\] is collections\.Counter"),
        ({"m": nn.Linear(1, 1)}, "Linear, which cannot be loaded"),
        ({(1, 2): 3}, r"key \(1, 2\) of tuple"),
    ],
)
def test_other_types_are_refused_by_name(tmp_path: Path, value: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        save_training_state(tmp_path / "x.state", value)
    assert list(tmp_path.iterdir()) == []


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (os.environ["EVIL_FOLDER"],)


@pytest.mark.parametrize("is_zip", [True, False])
def test_code_in_a_file_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_zip: bool) -> None:
    monkeypatch.setenv("EVIL_FOLDER", str(tmp_path / "ran"))
    torch.save({"a": Evil()}, tmp_path / "x.state", _use_new_zipfile_serialization=is_zip)
    with pytest.raises(
        CheckpointError, match="anything else could run code" if is_zip else "not a whole training state"
    ):
        load_training_state(tmp_path / "x.state")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, 0.99])
def test_truncated_files(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "x.state"
    save_training_state(path, {"a": torch.randn(1000)})
    size = int(keep * path.stat().st_size) if isinstance(keep, float) else keep
    os.truncate(path, size)
    with pytest.raises(CheckpointError, match=rf"x\.state: .*{size} bytes"):
        load_training_state(path)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.state"
    save_training_state(path, {"a": torch.zeros(10_000)})
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="truncated or corrupt"):
        load_training_state(path)


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no such training state"):
        load_training_state(tmp_path / "x.state")
    torch.save([1], tmp_path / "x.state")
    with pytest.raises(CheckpointError, match="holds a list, expected a dict"):
        load_training_state(tmp_path / "x.state")
    (tmp_path / "x.state").write_bytes(pickle.dumps({"a": 1}, protocol=4))
    with pytest.raises(CheckpointError, match="21 bytes that are not a whole training state"):
        load_training_state(tmp_path / "x.state")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.state"
    save_training_state(path, {"step": 1})
    with file_size_limit(10_000), pytest.raises(OSError, match=r"x\.state"):
        save_training_state(path, {"step": 2, "a": torch.randn(20_000)})
    assert load_training_state(path) == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.state"]
