"""Whole models as safetensors, a torch file or a distributed folder; training state that ranks write in parts."""

import json
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from caramba.data.checkpoint.folder import DCP_LABELS, DCP_METADATA, LOOP, MODEL, is_dcp
from caramba.data.checkpoint.header import read_metadata
from caramba.data.checkpoint.tensors import load_tensors, save_tensors
from caramba.data.checkpoint.training_state import load_training_state, save_training_state
from caramba.errors import CheckpointError
from caramba.runs.files import check_tree, find_root, record_files, write_json

TORCH_SUFFIX = ".ckpt"
LIGHTNING_FORMAT = "2.5.0"
"""Version whose checkpoints are written; later ones read it."""


def write_torch_file(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a checkpoint of Lightning with {"metadata", "model"} besides, for `torch.load(path, weights_only=True)`.

    `state_dict` has the tensors of `model` under `model.NAME`, as a LightningModule with an attribute `model` has
    them; both are stored once.
    """
    save_training_state(
        path,
        {
            "metadata": dict(metadata),
            "model": dict(tensors),
            "state_dict": {f"model.{name}": tensor for name, tensor in tensors.items()},
            "pytorch-lightning_version": LIGHTNING_FORMAT,
            "epoch": 0,
            "global_step": 0,
            "loops": {},
            "callbacks": {},
            "optimizer_states": [],
            "lr_schedulers": [],
        },
    )


def write_dcp(folder: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a folder of torch.distributed.checkpoint, from this process alone, and caramba.json with the metadata.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        save(dict(tensors), checkpoint_id=folder, no_dist=True)
    except CheckpointException as error:
        raise OSError(f"{folder}: could not write the tensors: {reason_of(error)}") from error
    write_json(folder / DCP_LABELS, dict(metadata))


def is_own_format(place: Path) -> bool:
    """Whether `place` is a torch file or a distributed checkpoint rather than safetensors."""
    return is_dcp(place) or (place.suffix == TORCH_SUFFIX and place.is_file())


def read_model_metadata(place: Path) -> dict[str, str]:
    """Read the metadata of a file or folder of any of the three formats.

    Raises:
        CheckpointError: missing, damaged, or a pickle that could run code.
    """
    if is_dcp(place):
        return _labels(place)
    return _torch_file(place)[1] if is_own_format(place) else read_metadata(place)


def read_model_tensors(place: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of a file or folder of any of the three formats, onto the CPU.

    Raises:
        CheckpointError: missing, damaged, or a pickle that could run code.
    """
    if is_dcp(place):
        return _read_dcp(place)
    return _torch_file(place)[0] if is_own_format(place) else load_tensors(place)


def write_model_file(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write the format of the name: `.safetensors`, `.ckpt`, or a folder for any other."""
    if path.suffix == ".safetensors":
        save_tensors(path, tensors, metadata)
    elif path.suffix == TORCH_SUFFIX:
        write_torch_file(path, tensors, metadata)
    else:
        write_dcp(path, tensors, metadata)


def _torch_file(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    state = load_training_state(path)
    if not {"metadata", "model"} <= set(state):
        raise CheckpointError(
            f"{path}: holds {sorted(map(str, state))[:5]}, expected the metadata and model that `caramba export "
            "--format ckpt` writes; convert other files to safetensors"
        )
    return state["model"], state["metadata"]


def _labels(folder: Path) -> dict[str, str]:
    try:
        return {str(key): str(value) for key, value in json.loads((folder / DCP_LABELS).read_text()).items()}
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder / DCP_LABELS}: not JSON ({error}); export the folder again") from error


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles a checkpoint's index: torch's descriptions of tensors and files, and nothing that could run code."""

    _MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    _DESCRIPTIONS = frozenset(
        {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
            "_StorageInfo",
        }
    )
    _NAMES = frozenset(
        {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("torch", "device"),
            ("pathlib", "PosixPath"),
            ("pathlib", "Path"),
        }
    )

    def find_class(self, module_name: str, global_name: str) -> Any:
        is_description = module_name in self._MODULES and global_name in self._DESCRIPTIONS
        is_dtype = module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)
        if is_description or is_dtype or (module_name, global_name) in self._NAMES:
            return super().find_class(module_name, global_name)
        raise CheckpointError(
            f"{DCP_METADATA}: names {module_name}.{global_name}, which no index of tensors needs and which could "
            "run code; export the folder again"
        )


def read_index(path: Path) -> Any:
    """Read the index of a distributed checkpoint without running code.

    Raises:
        CheckpointError: it names more than tensors and files.
    """
    with open(path, "rb") as file:
        return _MetadataUnpickler(file).load()


def dcp_reader(folder: Path) -> Any:
    """Return torch's reader of a folder, with its index read by `read_index`."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return read_index(folder / DCP_METADATA)

    return Reader(folder)


def _read_dcp(folder: Path) -> dict[str, torch.Tensor]:
    check_tree(folder)
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = dcp_reader(folder)
    try:
        index = reader.read_metadata().state_dict_metadata
        tensors: dict[str, Any] = {}
        for name, entry in index.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise CheckpointError(f"{folder}: {name} is not a tensor; a model's folder holds tensors alone")
            tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:  # torch wraps what its threads meet in several kinds
        raise CheckpointError(f"{folder}: cannot be read as a distributed checkpoint: {reason_of(error)}") from error
    return tensors


def reason_of(error: BaseException) -> str:
    """Return one line of what torch.distributed.checkpoint failed with; its own error, a BaseException, holds what each
    rank met."""
    met: BaseException = next((cause for cause, _ in getattr(error, "failures", {}).values()), error)
    return (str(met).splitlines() or [type(met).__name__])[0]


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


def load_sharded_state(place: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
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
