"""A teacher's outputs on disk, one file per sample, keyed by what made them and by the sample's index."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from caramba.console import logger
from caramba.errors import ConfigError
from caramba.model import Model
from caramba.runs.files import home, whole_file, write_json

Compute = Callable[[Tensor], dict[str, Tensor]]
CHECKSUM_BYTES = 4


class TeacherCache:
    """Outputs per sample: what is stored is read, what is missing is computed once and stored.

    Equal keys share a folder, so that epochs, phases and runs reuse each other's files. A file ends with the CRC-32
    of its safetensors; one that does not hold what it should is reported and made again.
    """

    def __init__(self, key: Mapping[str, Any], folder: Path | None = None) -> None:
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
        self.folder = (home() / "teacher_outputs" if folder is None else folder) / name
        if not (self.folder / "key.json").is_file():
            write_json(self.folder / "key.json", dict(key))

    def fetch(self, indices: Tensor, compute: Compute) -> dict[str, Tensor]:
        """Return the outputs of samples `indices` [B] stacked on dimension 0, on the device of `indices`.

        `compute(rows)` gives those of the batch's rows `rows` [B'], which are the ones that are not stored.
        """
        device, samples = indices.device, indices.tolist()
        found = [self._read(sample) for sample in samples]
        missing = [row for row, item in enumerate(found) if item is None]
        if missing:
            made = compute(torch.tensor(missing, device=device))
            for place, row in enumerate(missing):
                item = {name: tensor[place].contiguous() for name, tensor in made.items()}
                self._write(samples[row], item)
                found[row] = item
        items = [item for item in found if item is not None]
        return {name: torch.stack([item[name].to(device) for item in items]) for name in items[0]}

    def _path(self, sample: int) -> Path:
        return self.folder / f"{sample // 1000:06d}" / f"{sample}.targets"

    def _read(self, sample: int) -> dict[str, Tensor] | None:
        path = self._path(sample)
        if not path.is_file():
            return None
        content = path.read_bytes()
        body, checksum = content[:-CHECKSUM_BYTES], content[-CHECKSUM_BYTES:]
        if zlib.crc32(body).to_bytes(CHECKSUM_BYTES, "little") != checksum:
            logger.warning(
                f"{path}: {len(content)} bytes that are not whole teacher outputs; making them again"
            )
            return None
        return safetensors.torch.load(body)

    def _write(self, sample: int, tensors: Mapping[str, Tensor]) -> None:
        body = safetensors.torch.save({name: tensor.detach().cpu() for name, tensor in tensors.items()})
        with whole_file(self._path(sample)) as temporary:
            temporary.write_bytes(body + zlib.crc32(body).to_bytes(CHECKSUM_BYTES, "little"))


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


def teacher_hash(model: Model) -> str:
    """Return a SHA-256 of what a model computes: its description, for equal weights under another rotary base are
    another model, and its weights by name, shape and bytes, whatever device they are on."""
    spec = model.spec
    digest = hashlib.sha256(f"{spec.embedder!r} {spec.topology!r} {spec.head!r}".encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
