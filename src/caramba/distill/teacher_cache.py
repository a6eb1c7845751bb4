"""A teacher's outputs on disk, one file per sample, keyed by what made them and by the sample's index."""

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from caramba.console import logger
from caramba.errors import ConfigError
from caramba.runs.files import home, write_json

Compute = Callable[[Tensor], dict[str, Tensor]]
CHECKSUM_BYTES = 4
KEY = "key.json"
READERS = 8
"""Threads that read and write files; both leave the interpreter to others."""


class TeacherCache:
    """Outputs per sample: what is stored is read, what is missing is computed once and stored.

    Equal keys share a folder, so that epochs, phases and runs reuse each other's files. A file ends with the CRC-32
    of its safetensors; one that does not hold what it should is reported and made again.
    """

    def __init__(self, key: Mapping[str, Any], folder: Path | None = None) -> None:
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
        self.folder = (home() / "teacher_outputs" if folder is None else folder) / name
        self._readers: ThreadPoolExecutor | None = None
        self._begun: dict[int, Future[dict[str, Tensor] | None]] = {}
        if not (self.folder / KEY).is_file():
            write_json(self.folder / KEY, dict(key))

    @classmethod
    def at(cls, folder: Path, key: Mapping[str, Any], where: str) -> "TeacherCache":
        """Open the store of one key in a folder that a user names, or begin it.

        Raises:
            ConfigError: the folder holds something else, or outputs of another key.
        """
        path, wanted = folder / KEY, json.loads(json.dumps(dict(key)))
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            different = [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]
            if different:
                shown = "; ".join(
                    f"{name}: stored {_brief(found.get(name))}, this run {_brief(wanted.get(name))}"
                    for name in different
                )
                raise ConfigError(f"{where}={folder} was written for something else ({shown}); name another folder")
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{where}={folder}: holds other files and no {KEY}; name a new or an empty folder")
        else:
            write_json(path, wanted)
        store = cls.__new__(cls)
        store.folder, store._readers, store._begun = folder, None, {}
        return store

    def has_sample(self, sample: int) -> bool:
        """Whether a file of this sample exists."""
        return self._path(sample).is_file()

    def begin(self, indices: Tensor) -> None:
        """Start to read the outputs of samples `indices` [B], on the host, which the next `fetch` returns."""
        self._readers = self._readers or ThreadPoolExecutor(READERS)
        self._begun = {sample: self._readers.submit(self._read, sample) for sample in indices.tolist()}

    def fetch(self, indices: Tensor, device: torch.device, compute: Compute) -> dict[str, Tensor]:
        """Return the outputs of samples `indices` [B], on the host, stacked on dimension 0 and on `device`.

        `compute(rows)` gives those of the batch's rows `rows` [B'], which are the ones that are not stored.
        """
        samples = indices.tolist()
        if self._begun.keys() != set(samples):
            self.begin(indices)
        assert self._readers is not None
        readers, begun, self._begun = self._readers, self._begun, {}
        found = [begun[sample].result() for sample in samples]
        missing = [row for row, item in enumerate(found) if item is None]
        if missing:
            made = compute(torch.tensor(missing, device=device))
            host = {name: tensor.detach().cpu() for name, tensor in made.items()}
            rows = [{name: tensor[place] for name, tensor in host.items()} for place in range(len(missing))]
            list(readers.map(self._write, [samples[row] for row in missing], rows))
            if len(missing) == len(samples):
                return made
            for row, item in zip(missing, rows, strict=True):
                found[row] = item
        items = [item for item in found if item is not None]
        return {name: _stacked([item[name] for item in items], device) for name in items[0]}

    def _path(self, sample: int) -> Path:
        return self.folder / f"{sample // 1000:06d}" / f"{sample}.targets"

    def _read(self, sample: int) -> dict[str, Tensor] | None:
        path = self._path(sample)
        if not path.is_file():
            return None
        content = path.read_bytes()
        body, checksum = content[:-CHECKSUM_BYTES], content[-CHECKSUM_BYTES:]
        if zlib.crc32(body).to_bytes(CHECKSUM_BYTES, "little") != checksum:
            logger.warning(f"{path}: {len(content)} bytes that are not whole teacher outputs; making them again")
            return None
        return safetensors.torch.load(body)

    def _write(self, sample: int, tensors: Mapping[str, Tensor]) -> None:
        body = safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()})
        path = self._path(sample)
        path.parent.mkdir(exist_ok=True)
        # Not synced: a file that a crash leaves in part fails its checksum and is made again.
        temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
        temporary.write_bytes(body + zlib.crc32(body).to_bytes(CHECKSUM_BYTES, "little"))
        os.replace(temporary, path)


def _stacked(items: list[Tensor], device: torch.device) -> Tensor:
    """Stack rows of the host on a device.

    NumPy copies them by one thread; torch splits each copy over threads, which costs more than it where cores are busy.
    """
    # Not pinned, the copy to the device would wait for all that it has to do before.
    kept = torch.empty((len(items), *items[0].shape), dtype=items[0].dtype, pin_memory=device.type == "cuda")
    for row, item in zip(_bytes(kept), items, strict=True):
        row[:] = _bytes(item[None])[0]
    return kept.to(device, non_blocking=True)


def _bytes(x: Tensor) -> np.ndarray:
    return x.contiguous().flatten(1).view(torch.uint8).numpy()


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:17]}...{text[-1]}"


def refuse_over_cap(what: str, samples: int, sample_bytes: int, max_gb: float) -> None:
    """Say how large a cache of teacher outputs becomes, and refuse one over its cap.

    Raises:
        ConfigError: the estimate exceeds `max_gb`.
    """
    total = samples * sample_bytes
    text = f"{what}: teacher outputs of {samples:,} samples take {total / 1e9:.2f} GB on disk"
    if total > max_gb * 1e9:
        raise ConfigError(
            f"{text}, over teacher_cache_max_gb={max_gb:g}; raise it, train on fewer or shorter samples, "
            "or leave out cache_teacher_outputs (the teacher then runs at every step)"
        )
    logger.info(f"{text} (at most teacher_cache_max_gb={max_gb:g})")
