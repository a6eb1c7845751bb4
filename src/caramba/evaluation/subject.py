"""What benchmarks are given: named models on a device, and the held-out text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from caramba.data import TokenDataset, Tokenizer
from caramba.model import Model


@dataclass(frozen=True)
class Subjects:
    """Models by name (teacher, student, or a stage such as student_blockwise), and what they are measured on.

    `windows` returns the held-out windows at a block size, `train_windows` those of training; `token_bytes` holds the
    UTF-8 bytes of each token id, when the tokenizer is known; `max_length` is the longest sequence that the models
    trained on.
    """

    models: Mapping[str, Model]
    windows: Callable[[int], TokenDataset]
    token_bytes: np.ndarray | None
    vocab_size: int
    device: torch.device
    tokenizer: Tokenizer | None = None
    max_length: int = 2048
    train_windows: Callable[[int], TokenDataset] | None = None
