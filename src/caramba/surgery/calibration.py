"""Calibration of a teacher, kept on disk: a second surgery with another budget reads what the first one measured."""

import hashlib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from caramba.console import logger
from caramba.data import spread_windows
from caramba.data.checkpoint import load_tensors, read_metadata, save_tensors
from caramba.errors import CheckpointError, ConfigError
from caramba.layer import AttentionLayer
from caramba.model import Model, model_hash
from caramba.surgery.collect import LayerStatistics, collect_statistics, pack, unpack
from caramba.surgery.held_out import EvalWindows, capture

CALIBRATION_TOKENS = 262_144
LONGEST_WINDOW = 2048
HELD_OUT_TOKENS = 32_768
OUTPUT_TOKENS = 4096
"""Of those the first, whose activations are kept in every layer."""
ROTATION_WINDOWS = 32
_VERSION = "4"  # raise when the same inputs start to give other statistics
_CHECKSUM = "crc32"


@dataclass(frozen=True)
class CalibrationText:
    """Disjoint windows of the train split: `windows` [N, T] to calibrate on, `held_out` [n, T] to choose by; and the
    documents of each, if documents are separate."""

    windows: Tensor
    held_out: Tensor
    documents: Tensor | None = None
    held_out_documents: Tensor | None = None


@dataclass(frozen=True)
class Calibration:
    """What the teacher's attention layers gave, in execution order, by the layers themselves.

    `tokens` are all held-out windows [n, T], with their `documents`; `held_out` are activations on the first of them.
    `path` is the file of the statistics, if they are kept.
    """

    layers: tuple[tuple[str, AttentionLayer], ...]
    statistics: tuple[LayerStatistics, ...]
    held_out: tuple[EvalWindows, ...]
    n_tokens: int
    tokens: Tensor | None = None
    documents: Tensor | None = None
    path: Path | None = None

    def of(self, layer: AttentionLayer) -> tuple[LayerStatistics, EvalWindows]:
        """Return the statistics and the held-out activations of a teacher layer, on its device."""
        index = next(index for index, (_, known) in enumerate(self.layers) if known is layer)
        device = layer.out.weight.device
        return self.statistics[index].to(device), self.held_out[index].to(device)


def choose_windows(n_windows: int, block_size: int, tokens: int | None) -> tuple[list[int], list[int]]:
    """Return the indices of calibration and held-out windows, spread evenly over the `n_windows` there are.

    About OUTPUT_TOKENS are held out, at most a fifth of what there is, and after them up to HELD_OUT_TOKENS of windows
    that are in neither; no window is in both.

    Raises:
        ConfigError: there are fewer than two windows.
    """
    if n_windows < 2:
        raise ConfigError(
            f"surgery: the train split has {n_windows} window of {block_size} tokens, and calibration needs one to "
            "measure on and one to choose by; use more data or a smaller block_size"
        )
    held = max(1, min(OUTPUT_TOKENS // block_size, n_windows // 5))
    wanted = max(1, -(-(tokens or CALIBRATION_TOKENS) // block_size))
    total = min(n_windows, held + wanted)
    spread = [index * n_windows // total for index in range(total)]
    chosen = {index * total // held for index in range(held)}
    unused = sorted(set(range(n_windows)) - set(spread))
    more = spread_windows(len(unused), max(0, HELD_OUT_TOKENS // block_size - held))
    return (
        [window for index, window in enumerate(spread) if index not in chosen],
        [window for index, window in enumerate(spread) if index in chosen] + [unused[place] for place in more],
    )


def calibrate(
    teacher: Model,
    text: CalibrationText,
    *,
    first_tokens: int = 0,
    cache: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Calibration:
    """Measure the teacher's attention layers on `text`, or read from the folder `cache` what was measured before.

    Statistics leave out the `first_tokens` that the student's layers keep exact; held-out windows have all.

    Raises:
        CheckpointError: a layer gave a value that is not finite.
    """
    layers = tuple(teacher.attention_layers())
    path = None if cache is None else cache / f"{calibration_key(teacher, text, first_tokens)}.safetensors"
    statistics = None if path is None else _read(path)
    if statistics is not None and progress is not None:
        progress(f"calibration: read from {path}")
    if statistics is None:
        statistics = collect_statistics(
            teacher,
            layers,
            text.windows,
            documents=text.documents,
            rotation_windows=ROTATION_WINDOWS,
            first_tokens=first_tokens,
            progress=progress,
        )
        if path is not None:
            tensors = {name: tensor.cpu() for name, tensor in pack(statistics).items()}
            save_tensors(path, tensors, {_CHECKSUM: _checksum(tensors)})
    first, ids = slice(max(1, OUTPUT_TOKENS // text.held_out.shape[1])), text.held_out_documents
    held_out = capture(teacher, layers, text.held_out[first], None if ids is None else ids[first])
    counted = text.windows.numel() if text.documents is None else int((text.documents >= 0).sum())
    return Calibration(layers, tuple(statistics), tuple(held_out), counted, text.held_out, ids, path)


def _read(path: Path) -> list[LayerStatistics] | None:
    if not path.is_file():
        return None
    try:
        tensors = load_tensors(path)
        is_whole = read_metadata(path).get(_CHECKSUM) == _checksum(tensors)
    except CheckpointError:
        is_whole, tensors = False, {}
    if not is_whole:
        logger.warning(f"calibration: {path} is damaged; measuring again")
        return None
    return unpack(tensors)


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(tensors[name].contiguous().flatten().view(torch.uint8).numpy().data, value)
    return f"{value:08x}"


def calibration_key(teacher: Model, text: CalibrationText, first_tokens: int = 0) -> str:
    """Return a SHA-256 over the teacher's description and weights, the calibration text and the settings."""
    digest = hashlib.sha256(f"{_VERSION} {ROTATION_WINDOWS} {first_tokens} {model_hash(teacher)}".encode())
    for name, tensor in (("windows", text.windows), ("documents", text.documents)):
        if tensor is not None:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            plain = tensor.detach().cpu().contiguous().flatten()
            digest.update(plain.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
