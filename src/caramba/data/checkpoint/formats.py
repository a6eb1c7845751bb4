"""Whole models in three file formats: safetensors, a weights-only torch file, a distributed checkpoint folder."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from caramba.data.checkpoint.folder import DCP_LABELS, DCP_METADATA, is_dcp
from caramba.data.checkpoint.header import read_metadata
from caramba.data.checkpoint.tensors import load_tensors, save_tensors
from caramba.data.checkpoint.training_state import load_training_state, save_training_state
from caramba.errors import CheckpointError
from caramba.runs.files import check_tree, write_json

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
        raise CheckpointError(
            f"{folder / DCP_LABELS}: not JSON ({error}); export the folder again"
        ) from error


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
                raise CheckpointError(
                    f"{folder}: {name} is not a tensor; a model's folder holds tensors alone"
                )
            tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        load(tensors, storage_reader=reader, no_dist=True)
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:  # torch wraps what its threads meet in several kinds
        raise CheckpointError(
            f"{folder}: cannot be read as a distributed checkpoint: {reason_of(error)}"
        ) from error
    return tensors


def reason_of(error: BaseException) -> str:
    """Return one line of what torch.distributed.checkpoint failed with; its own error, a BaseException, holds what each
    rank met."""
    met: BaseException = next((cause for cause, _ in getattr(error, "failures", {}).values()), error)
    return (str(met).splitlines() or [type(met).__name__])[0]
