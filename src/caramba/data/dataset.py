"""Windows of tokens in memory-mapped files: one stream, or separate or packed documents; their order and overlap."""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from caramba.data.corpus import Corpus
from caramba.data.folder import Tokens, TokenStream, open_token_folder
from caramba.data.token_file import open_token_file
from caramba.errors import DataError

IGNORED = -100  # a target that no loss counts; what torch's cross_entropy ignores by default


class Windows(Protocol):
    """Disjoint windows of tokens: item i is (x [T], y [T]) int64, y shifted by one and -100 where nothing counts.

    If attention is masked per document it also has document ids [T], -1 for padding.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Tensor, ...]: ...


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
            raise DataError(f"tokens have shape {tokens.shape} and dtype {tokens.dtype}; expected 1-D integers")
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


class WindowSampler(Sampler[list[int]]):
    """An endless batch sampler whose stream is a pure function of the seed.

    Sample number s of the stream is window perm_e[s mod n] with e = s div n; perm_e depends on (seed, e) alone. A
    global batch is the next batch_size * world_size samples, of which rank r takes the r-th batch_size. The
    position counts samples over all ranks, so a run can resume with another number of ranks.

    With prefetching workers this sampler runs ahead of training; `state_dict(batches=k)` is the state after k
    batches were *trained on* since the last start, whatever was prefetched.

    Args:
        n_windows: n, length of the dataset.
        batch_size: samples per batch of one rank.
        seed: at least 0.
        start: position to begin at, in samples over all ranks.
        rank: this process.
        world_size: number of processes.

    Raises:
        DataError: an argument is out of range.
    """

    def __init__(
        self, n_windows: int, batch_size: int, seed: int, start: int = 0, rank: int = 0, world_size: int = 1
    ) -> None:
        if n_windows < 1 or batch_size < 1 or seed < 0 or start < 0 or not 0 <= rank < world_size:
            raise DataError(
                f"WindowSampler: n_windows={n_windows}, batch_size={batch_size}, seed={seed}, start={start},"
                f" rank={rank}, world_size={world_size}; expected n_windows and batch_size of at least 1, seed and"
                " start of at least 0, and 0 <= rank < world_size"
            )
        self.n_windows = n_windows
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.start = start
        self.position = start
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    @property
    def global_batch_size(self) -> int:
        """Samples that all ranks together take per batch."""
        return self.batch_size * self.world_size

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            first = self.position + self.rank * self.batch_size
            batch = [self.window(first + i) for i in range(self.batch_size)]
            self.position += self.global_batch_size
            yield batch

    def window(self, sample: int) -> int:
        """Return the window that sample number `sample` of the stream is."""
        epoch, place = divmod(sample, self.n_windows)
        if epoch != self._epoch:
            self._order = epoch_permutation(self.n_windows, self.seed, epoch)
            self._epoch = epoch
        return int(self._order[place])

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Return the state to resume from: after what was yielded, or after `batches` batches since `start`."""
        position = self.position if batches is None else self.start + batches * self.global_batch_size
        return {"position": position, "seed": self.seed, "n_windows": self.n_windows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state of the same stream, saved with any batch size and number of ranks.

        Raises:
            DataError: the state is of another seed or dataset, whose stream differs.
        """
        for key, own in (("seed", self.seed), ("n_windows", self.n_windows)):
            if state[key] != own:
                raise DataError(
                    f"sampler state: {key} was {state[key]} when it was saved, now {own}; the order of the data would"
                    f" differ: resume with the same data, block_size and seed"
                )
        self.start = self.position = int(state["position"])


def count_targets(window_targets: np.ndarray, seed: int, start: int, samples: int) -> int:
    """Count the targets in `samples` samples of the stream from `start` on, as `WindowSampler` yields them.

    Args:
        window_targets: targets that count in each window, int64 [n_windows].
    """
    n, end, total = len(window_targets), start + samples, 0
    for epoch in range(start // n, -(-end // n)):
        low, high = max(start - epoch * n, 0), min(end - epoch * n, n)
        # A whole epoch needs no order, so a long run costs two permutations at most.
        here = window_targets if high - low == n else window_targets[epoch_permutation(n, seed, epoch)[low:high]]
        total += int(here.sum())
    return total


def epoch_permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of n windows in one epoch, int64 [n]: the argsort of n raw PCG64 draws seeded (seed, epoch).

    NumPy keeps raw bit streams the same over versions, which it does not promise of `Generator.permutation`.
    """
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n)
    return np.argsort(keys, kind="stable")


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


def spread_windows(available: int, wanted: int) -> list[int]:
    """Return up to `wanted` distinct window indices, evenly spread over `available` ones, in order."""
    count = min(available, wanted)
    return [index * available // count for index in range(count)] if count else []


def batches(dataset: Windows, indices: Sequence[int], size: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield windows in order, as (x, y) or (x, y, document ids) of shape [b, T], b <= size."""
    for start in range(0, len(indices), size):
        items = [dataset[index] for index in indices[start : start + size]]
        yield tuple(torch.stack(parts) for parts in zip(*items, strict=True))


def documents_of(batch: Sequence[Tensor]) -> Tensor | None:
    """Return the document ids [B, T] of a batch, -1 for padding; None without document masking."""
    return next((part for part in batch[2:] if part.dim() == 2), None)


def samples_of(batch: Sequence[Tensor]) -> Tensor | None:
    """Return the samples' indices [B] of a batch that carries them."""
    return next((part for part in batch[2:] if part.dim() == 1), None)


LEAST_TOKENS = 64  # shorter documents are equal by chance, or boilerplate


def refuse_overlap(corpus: Corpus, windows: TokenDataset, indices: Sequence[int], *, what: str) -> None:
    """Check that no document which windows of the train split read is in the evaluation split too.

    Documents of fewer than 64 tokens do not count, and it makes no difference whether documents are separate. A flat
    file names no documents, so there is nothing to compare: its splits share no position.

    Raises:
        DataError: a document is in both; the message names it.
    """
    if corpus.index is None:
        return
    starts, held_out = corpus.index
    packs = isinstance(windows, DocumentDataset | PackedDataset)
    firsts = windows.documents_of(indices) if packs else documents_read(starts, indices, windows.block_size)
    chosen = np.searchsorted(starts, firsts)
    lengths = np.diff(starts, append=corpus.train.size)
    chosen = chosen[lengths[chosen] >= LEAST_TOKENS]
    read = {_hash(corpus.train, int(starts[each]), int(lengths[each])): int(starts[each]) for each in chosen}
    sizes = np.diff(held_out, append=corpus.val.size)
    for each in np.flatnonzero(np.isin(sizes, lengths[chosen])):
        first = int(held_out[each])
        same = read.get(_hash(corpus.val, first, int(sizes[each])))
        if same is not None:
            raise DataError(
                f"{what}: the document of {sizes[each]} tokens at token {same} of {corpus.paths[0]} is also in the "
                f"evaluation split, at token {first} of {corpus.paths[1]}; remove one of them, or make the folder with "
                "`caramba prepare text`, which holds documents out by their hash"
            )


def _hash(tokens: Tokens, first: int, length: int) -> bytes:
    ids = np.asarray(tokens[first : first + length]).astype(np.int64)
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
