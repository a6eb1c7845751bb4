"""Resumable training state: tensors and plain values, written whole, read without running code."""

import errno
import mmap
import os
import pickle
import resource
import shutil
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from caramba.errors import CheckpointError
from caramba.runs.files import check_file, whole_file

_SCALARS = (str, int, float, bool, type(None), bytes, torch.dtype, torch.device, torch.Size)
_TENSORS = (torch.Tensor, torch.nn.Parameter)


def save_training_state(path: Path, state: dict[str, Any]) -> None:
    """Write `state` (model, optimiser, sampler, random states, counters) so that it loads with weights only.

    Args:
        path: any name; `.state` is the custom.
        state: nested dict, list and tuple of tensors, numbers, text, bytes, None, torch.dtype and torch.device.

    Raises:
        CheckpointError: names the first value that is of another type.
        OSError: the disk is full or the folder cannot be written; the old file is as it was.
    """
    path = Path(path)
    _check_plain(path, state, "state")
    with whole_file(path) as temporary:
        try:
            torch.save(state, temporary)
        except RuntimeError as error:  # torch's writer reports a full disk as one
            raise OSError(f"{path}: {_reason(path.parent)}could not write the training state: {error}") from error


def _reason(folder: Path) -> str:
    """Return the reason why a file in `folder` cannot grow, which torch's error does not name; empty if unknown."""
    if shutil.disk_usage(folder).free < mmap.PAGESIZE:
        return f"{os.strerror(errno.ENOSPC)}: "
    has_limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
    return f"{os.strerror(errno.EFBIG)}: " if has_limit else ""


def load_training_state(path: Path, device: str | torch.device = "cpu") -> dict[str, Any]:
    """Read what `save_training_state` wrote, tensors onto `device`.

    Raises:
        CheckpointError: the file is missing, truncated, corrupt, or holds anything but tensors and plain values.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such training state; check resume=")
    check_file(path)
    _check_archive(path)
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: holds more than tensors and plain values, and anything else could run code:"
            f" {str(error).splitlines()[0]}"
        ) from error
    except RuntimeError as error:  # an intact archive that torch.save did not write
        raise CheckpointError(
            f"{path}: {path.stat().st_size} bytes that are not a training state: {str(error).splitlines()[0]}"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, expected a dict of training state")
    return state


def _check_archive(path: Path) -> None:
    """Check lengths and checksums of the archive that torch.save wrote; torch.load itself checks no checksum."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        damaged = str(error)
    if damaged is not None:
        raise CheckpointError(
            f"{path}: truncated or corrupt, {path.stat().st_size} bytes that are not a whole training state"
            f" ({damaged}); resume from an earlier checkpoint"
        )


def _check_plain(path: Path, value: Any, where: str) -> None:
    kind = type(value)  # exact types: a subclass would need its own code to load
    if kind in _SCALARS or kind in _TENSORS:
        return
    if kind in (dict, OrderedDict):
        for key, item in value.items():
            if type(key) not in (str, int, float, bool):
                raise CheckpointError(f"{path}: {where} has key {key!r} of {type(key).__name__}; use text or integers")
            _check_plain(path, item, f"{where}[{key!r}]")
    elif kind in (list, tuple):
        for index, item in enumerate(value):
            _check_plain(path, item, f"{where}[{index}]")
    else:
        raise CheckpointError(
            f"{path}: {where} is {kind.__module__}.{kind.__qualname__}, which cannot be loaded without running code;"
            " save tensors, numbers, text, lists and dicts"
        )
