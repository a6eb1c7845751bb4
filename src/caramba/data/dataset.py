"""Datasets of disjoint next-token windows over memory-mapped tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from caramba.data.folder import open_token_folder
from caramba.data.stream import Tokens, TokenStream
from caramba.data.token_file import open_token_file
from caramba.errors import DataError

IGNORED = -100  # a target that no loss counts; what torch's cross_entropy ignores by default


class TokenDataset(Dataset[tuple[torch.Tensor, ...]]):
    """Disjoint windows: item i is tokens[i b : i b + b] and its targets tokens[i b + 1 : i b + b + 1], b = block_size.

    Every target is predicted once: the last target of a window is the first input of the next. Only the window
    that is asked for is read; a memory map is reopened, not copied, in a worker process.

    Args:
        tokens: 1-D array of ids, memory-mapped or not, or a stream of several.
        block_size: T, tokens per window.

    Shape: item: x and y, each int64 [T]; length (n - 1) // T.

    Raises:
        DataError: `tokens` is not 1-D integers or is shorter than block_size + 1.
    """

    def __init__(self, tokens: Tokens, block_size: int) -> None:
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise DataError(
                f"tokens have shape {tokens.shape} and dtype {tokens.dtype}; expected 1-D integers"
            )
        if block_size < 1:
            raise DataError(f"block_size={block_size}; expected at least 1")
        if tokens.size < block_size + 1:
            where = getattr(tokens, "filename", None) or "tokens"
            raise DataError(
                f"{where}: {tokens.size} tokens, one window of block_size={block_size} needs {block_size + 1};"
                " use a smaller block_size or more data"
            )
        self.tokens = tokens
        self.block_size = block_size

    def __len__(self) -> int:
        return (self.tokens.size - 1) // self.block_size

    @property
    def window_targets(self) -> np.ndarray:
        """Targets that count in each window, int64 [len(self)]: here all T."""
        return np.broadcast_to(np.int64(self.block_size), len(self))

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.block_size
        stop = start + self.block_size
        x = self.tokens[start:stop].astype(np.int64)
        y = self.tokens[start + 1 : stop + 1].astype(np.int64)
        return torch.from_numpy(x), torch.from_numpy(y)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        is_stream = isinstance(self.tokens, TokenStream)
        stream = self.tokens if isinstance(self.tokens, TokenStream) else TokenStream([self.tokens])
        places = stream.places()
        if places is not None:  # pickling a memory map would send the whole file
            del state["tokens"]
            state["_places"] = (is_stream, self.tokens.dtype, places)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        places = state.pop("_places", None)
        self.__dict__.update(state)
        if places is not None:
            is_stream, dtype, found = places
            parts = [np.memmap(file, dtype, "r", offset, (size,)) for file, offset, size in found]
            self.tokens = TokenStream(parts) if is_stream else parts[0]


class NpyDataset(TokenDataset):
    """`TokenDataset` of a .npy file, memory-mapped as it is.

    Raises:
        DataError: the file is not a 1-D integer .npy, is damaged, or too short.
    """

    def __init__(self, path: str | Path, block_size: int) -> None:
        super().__init__(_open(path, ".npy"), block_size)


class TokensDataset(TokenDataset):
    """`TokenDataset` of a .tokens file (integers in text), read once into a memory-mapped sidecar.

    Raises:
        DataError: the file holds anything but integers and white space, or is too short.
    """

    def __init__(self, path: str | Path, block_size: int) -> None:
        super().__init__(_open(path, ".tokens"), block_size)


def build_token_dataset(*, path: str | Path, block_size: int) -> TokenDataset:
    """Build the dataset that the path calls for: .npy, .tokens, or a token folder's train split.

    Raises:
        DataError: the path is none of these, or does not hold what it should.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return TokenDataset(open_token_folder(path).train, block_size)
    if path.suffix == ".tokens":
        return TokensDataset(path, block_size)
    if path.suffix == ".npy":
        return NpyDataset(path, block_size)
    return TokenDataset(open_token_file(path).tokens, block_size)  # raises, naming what is accepted


def _open(path: str | Path, suffix: str) -> np.memmap:
    path = Path(path).expanduser()
    if path.suffix != suffix:
        raise DataError(f"{path}: expected a {suffix} file; build_token_dataset chooses by suffix")
    return open_token_file(path).tokens
