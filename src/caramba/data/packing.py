"""Windows of whole documents by best fit, with the document ids and positions that keep documents apart."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import torch
from torch.utils.data import Dataset

from caramba.data.stream import Tokens
from caramba.errors import DataError

IGNORED = -100  # the target of padding, which no loss counts


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


class PackedDataset(Dataset[dict[str, torch.Tensor]]):
    """Windows of `pack_best_fit`, each item with what attention and RoPE need to keep documents apart.

    Args:
        tokens: 1-D ids; every document ends with its end mark.
        documents: first token of each document, as in a token folder's index.
        block_size: T.
        pad_id: the id of padding inputs, such as the end mark's.

    Shape: `x`, `y`, `document_ids`, `positions`, each int64 [T]. `document_ids` numbers the runs of a window from 0,
        -1 for padding; `positions` starts at 0 in every run; `y` is -100 for padding.

    Raises:
        DataError: `documents` is not an increasing index into `tokens`, or no document has two tokens.
    """

    def __init__(self, tokens: Tokens, documents: np.ndarray, block_size: int, pad_id: int) -> None:
        starts = np.asarray(documents, dtype=np.int64)
        lengths = np.diff(starts, append=tokens.size)
        if starts.size == 0 or starts[0] != 0 or (lengths <= 0).any():
            raise DataError(
                f"{starts.size} documents over {tokens.size} tokens; expected first tokens that begin at 0 and"
                " increase, as the document index of a token folder has them"
            )
        self.tokens, self.block_size, self.pad_id = tokens, block_size, pad_id
        self.starts = starts
        self.windows = pack_best_fit(lengths, block_size)
        if not self.windows:
            raise DataError(f"{starts.size} documents of one token each hold nothing to predict")

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = np.full(self.block_size, self.pad_id, dtype=np.int64)
        y = np.full(self.block_size, IGNORED, dtype=np.int64)
        document_ids = np.full(self.block_size, -1, dtype=np.int64)
        positions = np.zeros(self.block_size, dtype=np.int64)
        place = 0
        for number, (document, start, count) in enumerate(self.windows[index]):
            first = int(self.starts[document]) + start
            ids = self.tokens[first : first + count + 1].astype(np.int64)
            here = slice(place, place + count)
            x[here], y[here] = ids[:-1], ids[1:]
            document_ids[here] = number
            positions[here] = np.arange(count)
            place += count
        fields = {"x": x, "y": y, "document_ids": document_ids, "positions": positions}
        return {name: torch.from_numpy(value) for name, value in fields.items()}
