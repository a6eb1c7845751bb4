"""Failures of torch.distributed.checkpoint, whose own error is no Exception, are caramba's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from caramba.data.checkpoint.folder import MODEL, latest_sharded_state
from caramba.data.checkpoint.formats import (
    load_sharded_state,
    read_model_tensors,
    save_sharded_state,
    write_dcp,
)
from caramba.errors import CheckpointError
from caramba.train import has_saved_state
from tests.unit.data.checkpoint.test_tensors import file_size_limit

LABELS = {"spec": "{}"}


@pytest.fixture
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    yield
    dist.destroy_process_group()


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(64, 64)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def cut(folder: Path) -> None:
    for file in folder.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.usefixtures("_alone")
def test_a_sharded_state_that_is_damaged_or_does_not_fit_the_disk(tmp_path: Path) -> None:
    model, optimizer = trained()
    save_sharded_state(tmp_path, model, optimizer, {"global_step": 1}, step=1, labels=LABELS)
    with file_size_limit(4096), pytest.raises(OSError, match="00000002: could not write the sharded state: "):
        save_sharded_state(tmp_path, model, optimizer, {"global_step": 2}, step=2, labels=LABELS)
    place = latest_sharded_state(tmp_path)
    assert place is not None
    assert place.name == "00000001", "the older state is as it was"
    load_sharded_state(place, model, optimizer)
    cut(place / MODEL)
    with pytest.raises(CheckpointError, match=r"00000001: cannot be read as a sharded state: .*; remove the folder"):
        load_sharded_state(place, model, optimizer)


def test_a_distributed_checkpoint_that_is_damaged_or_does_not_fit_the_disk(tmp_path: Path) -> None:
    tensors = {"weight": torch.ones(4096)}
    with file_size_limit(4096), pytest.raises(OSError, match="full: could not write the tensors: "):
        write_dcp(tmp_path / "full", tensors, {})
    write_dcp(tmp_path / "whole", tensors, {})
    cut(tmp_path / "whole")
    with pytest.raises(CheckpointError, match="whole: cannot be read as a distributed checkpoint: "):
        read_model_tensors(tmp_path / "whole")


def test_a_first_save_that_was_cut_short_is_no_state(tmp_path: Path) -> None:
    state = tmp_path / "pretrain.state.pt"
    (state / "00000010" / MODEL).mkdir(parents=True)
    assert not has_saved_state(state)
    (state / "00000010" / "loop.pt").touch()
    assert has_saved_state(state)
    (tmp_path / "blockwise.state.pt").touch()
    assert has_saved_state(tmp_path / "blockwise.state.pt")
