"""Windows whose documents stay separate: cut from the stream as it is, or packed with whole documents by best fit."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import torch

from caramba.data.corpus import Corpus
from caramba.data.dataset import IGNORED, TokenDataset
from caramba.data.stream import Tokens
from caramba.errors import DataError


def pack_best_fit(lengths: np.ndarray, block_size: int) -> list[list[tuple[int, int, int]]]:
    """Pack documents into windows of `block_size` by best-fit decreasing.

    A document of n tokens (its end mark counted) has n - 1 predictions. Those beyond a window are cut into runs of
    block_size; runs are placed longest first, each into the window with the least room that still holds it, or
    into a new one. Every prediction inside a document is in exactly one window, none crosses documents.

    Args:
        lengths: tokens per document.
        block_size: T, predictions per window.

    Returns:
        Windows as lists of (document, first token within it, predictions), in the order of placement.

    Reference: Ding et al. 2024, arXiv 2404.10830, section 3.2; runs of equal length keep the documents' order.
    """
    if block_size < 1:
        raise DataError(f"block_size={block_size}; expected at least 1")
    runs = [
        (start, min(block_size, int(n) - 1 - start), document)
        for document, n in enumerate(lengths)
        for start in range(0, int(n) - 1, block_size)
    ]
    runs.sort(key=lambda run: -run[1])  # stable
    windows: list[list[tuple[int, int, int]]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of by_room, sorted: at most block_size of them
    for start, count, document in runs:
        place = bisect_left(rooms, count)
        if place == len(rooms):
            room, window = block_size, len(windows)
            windows.append([])
        else:
            room = rooms[place]
            window = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[place]
        windows[window].append((document, start, count))
        left = room - count
        if left:
            if left not in by_room:
                by_room[left] = []
                insort(rooms, left)
            by_room[left].append(window)
    return windows


def documents_read(starts: np.ndarray, indices: Sequence[int], block_size: int) -> np.ndarray:
    """Return which of the documents that begin at `starts` the windows `indices` of a stream read, ascending, int64."""
    begins = np.asarray(indices, dtype=np.int64) * block_size
    lowest = np.searchsorted(starts, begins, side="right") - 1
    highest = np.searchsorted(starts, begins + block_size)
    return np.unique(np.concatenate([starts[low:high] for low, high in zip(lowest, highest, strict=True)]))


class DocumentDataset(TokenDataset):
    """`TokenDataset` whose windows separate their documents.

    The first token of a document is not predicted from the last of the one before.

    Args:
        tokens: 1-D ids; every document ends with its end mark.
        documents: first token of each document, as in a token folder's index.
        block_size: T.

    Shape: item: x, y and document ids, each int64 [T]. Ids number the documents of a window from 0; `y` is -100 at
        the last token of a document.

    Raises:
        DataError: `documents` is not an increasing index into `tokens`.
    """

    def __init__(self, tokens: Tokens, documents: np.ndarray, block_size: int) -> None:
        super().__init__(tokens, block_size)
        self.starts = _checked(documents, tokens)

    def documents_of(self, indices: Sequence[int]) -> np.ndarray:
        """Return the first tokens of the documents that windows read, ascending, int64."""
        return documents_read(self.starts, indices, self.block_size)

    @property
    def window_targets(self) -> np.ndarray:
        ends = self.starts[1:] - 1  # where a first token would be predicted
        lost = np.bincount(ends // self.block_size, minlength=len(self))[: len(self)]
        return self.block_size - lost

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        x, y = super().__getitem__(index)
        begin = index * self.block_size
        lowest, highest = np.searchsorted(self.starts, (begin + 1, begin + self.block_size + 1))
        firsts = self.starts[lowest:highest] - begin  # 1 to T: firsts that this window's targets reach
        ids = np.zeros(self.block_size + 1, dtype=np.int64)
        ids[firsts] = 1
        y[torch.from_numpy(firsts - 1)] = IGNORED
        return x, y, torch.from_numpy(ids[:-1].cumsum())


class PackedDataset(TokenDataset):
    """Windows of `pack_best_fit`, whose documents are separate in attention and positions.

    Args:
        tokens: 1-D ids; every document ends with its end mark.
        documents: first token of each document, as in a token folder's index.
        block_size: T.
        pad_id: the id of padding inputs, such as the end mark's.

    Shape: item: x, y and document ids, each int64 [T]. Ids number the runs of a window from 0, -1 is padding; `y` is
        -100 for padding.

    Raises:
        DataError: `documents` is not an increasing index into `tokens`, or no document has two tokens.
    """

    def __init__(self, tokens: Tokens, documents: np.ndarray, block_size: int, pad_id: int) -> None:
        super().__init__(tokens, block_size)
        starts = self.starts = _checked(documents, tokens)
        self.pad_id = pad_id
        windows = pack_best_fit(np.diff(starts, append=tokens.size), block_size)
        if not windows:
            raise DataError(f"{starts.size} documents of one token each hold nothing to predict")
        runs = np.array([run for window in windows for run in window], dtype=np.int64)
        self._firsts = starts[runs[:, 0]] + runs[:, 1]
        self._counts = runs[:, 2]
        self._ends = np.cumsum([len(window) for window in windows])

    def __len__(self) -> int:
        return self._ends.size

    def documents_of(self, indices: Sequence[int]) -> np.ndarray:
        """Return the first tokens of the documents that windows read, ascending, int64."""
        runs = [np.arange(self._ends[index - 1] if index else 0, self._ends[index]) for index in indices]
        firsts = self._firsts[np.concatenate(runs)]
        return np.unique(self.starts[np.searchsorted(self.starts, firsts, side="right") - 1])

    @property
    def window_targets(self) -> np.ndarray:
        return np.diff(self._counts.cumsum()[self._ends - 1], prepend=0)

    @property
    def padding(self) -> float:
        """Share of all positions that is padding."""
        return 1.0 - float(self._counts.sum()) / (len(self) * self.block_size)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        x = np.full(self.block_size, self.pad_id, dtype=np.int64)
        y = np.full(self.block_size, IGNORED, dtype=np.int64)
        documents = np.full(self.block_size, -1, dtype=np.int64)
        place = 0
        first_run = int(self._ends[index - 1]) if index else 0
        for run in range(first_run, int(self._ends[index])):
            first, count = int(self._firsts[run]), int(self._counts[run])
            ids = self.tokens[first : first + count + 1].astype(np.int64)
            here = slice(place, place + count)
            x[here], y[here] = ids[:-1], ids[1:]
            documents[here] = run - first_run
            place += count
        return torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(documents)


def open_windows(corpus: Corpus, split: str, block_size: int) -> TokenDataset:
    """Return the disjoint windows of the `train` or `val` split, packed as the corpus was asked for.

    Raises:
        DataError: the split does not hold one window.
    """
    side = ("train", "val").index(split)
    tokens = (corpus.train, corpus.val)[side]
    if corpus.documents is None:
        return TokenDataset(tokens, block_size)
    documents = corpus.documents[side]
    if corpus.packing == "concat":
        return DocumentDataset(tokens, documents, block_size)
    assert corpus.tokenizer is not None  # only token folders have documents
    return PackedDataset(tokens, documents, block_size, corpus.tokenizer.eos_id)


def _checked(documents: np.ndarray, tokens: Tokens) -> np.ndarray:
    starts = np.asarray(documents, dtype=np.int64)
    if starts.size == 0 or starts[0] != 0 or (np.diff(starts, append=tokens.size) <= 0).any():
        raise DataError(
            f"{starts.size} documents over {tokens.size} tokens; expected first tokens that begin at 0 and"
            " increase, as the document index of a token folder has them"
        )
    return starts
