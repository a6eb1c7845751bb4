"""Training state of which each rank writes its part: a folder that any number of ranks can resume from."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from caramba.data.checkpoint.folder import DCP_LABELS, LOOP, MODEL
from caramba.data.checkpoint.formats import dcp_reader, reason_of
from caramba.data.checkpoint.training_state import load_training_state, save_training_state
from caramba.errors import CheckpointError
from caramba.runs.files import check_tree, find_root, record_files, write_json

OPTIMIZER = "optimizer"


def save_sharded_state(
    folder: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loop: Mapping[str, Any],
    *,
    step: int,
    labels: Mapping[str, str],
) -> None:
    """Write folder/STEP/ whole from all ranks: model/ and optimizer/ of torch.distributed.checkpoint, and loop.pt,
    which is written last and marks the rest as complete. Older steps are then removed.

    `labels` describe the model, so that model/ is a checkpoint of its own, which `caramba export` reads.

    Raises:
        CheckpointError: `loop` holds something that is no plain value.
        OSError: the disk is full or the folder cannot be written; the older state is as it was.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    place = Path(folder) / f"{step:08d}"
    is_main = dist.get_rank() == 0
    if is_main:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
    dist.barrier()
    try:
        save(get_model_state_dict(model), checkpoint_id=place / MODEL)
        save({OPTIMIZER: get_optimizer_state_dict(model, optimizer)}, checkpoint_id=place / OPTIMIZER)
    except CheckpointException as error:  # on every rank, whichever met it
        raise OSError(f"{place}: could not write the sharded state: {reason_of(error)}") from error
    if is_main:
        write_json(place / MODEL / DCP_LABELS, dict(labels))
        if (root := find_root(place)) is not None:
            record_files(root, (file for file in place.rglob("*") if file.is_file()))
        save_training_state(place / LOOP, dict(loop))
        for older in Path(folder).iterdir():
            if older != place:
                shutil.rmtree(older)
    dist.barrier()


def load_sharded_state(
    place: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Read what `save_sharded_state` wrote into a sharded model and its optimiser, whatever ranks wrote it, and return
    the loop's state.

    Raises:
        CheckpointError: the state is of another model, or damaged.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.checkpoint.state_dict_loader import load

    check_tree(place)
    loop = load_training_state(place / LOOP)
    weights: dict[str, Any] = get_model_state_dict(model)
    try:
        _check_fits(place, dcp_reader(place / MODEL), weights)
        load(weights, storage_reader=dcp_reader(place / MODEL))
        states = {OPTIMIZER: get_optimizer_state_dict(model, optimizer)}
        load(states, storage_reader=dcp_reader(place / OPTIMIZER))
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:  # torch wraps what its threads meet in several kinds
        raise CheckpointError(
            f"{place}: cannot be read as a sharded state: {reason_of(error)}; remove the folder to begin the phase "
            "again"
        ) from error
    set_model_state_dict(model, weights)
    set_optimizer_state_dict(model, optimizer, states[OPTIMIZER])
    return loop


def _check_fits(place: Path, reader: Any, weights: Mapping[str, torch.Tensor]) -> None:
    stored = reader.read_metadata().state_dict_metadata
    found = {name: tuple(entry.size) for name, entry in stored.items()}
    expected = {name: tuple(value.shape) for name, value in weights.items()}
    wrong = [
        f"{name}: expected {expected.get(name)}, found {found.get(name)}"
        for name in sorted({*expected, *found})
        if expected.get(name) != found.get(name)
    ]
    if wrong:
        raise CheckpointError(
            f"{place}: is the state of another model, {len(wrong)} tensors differ:\n  "
            + "\n  ".join(wrong[:10])
            + "\n  use the manifest that it was trained with, or remove it"
        )
