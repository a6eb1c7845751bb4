"""The order in which windows are trained on: the same for every number of ranks, and resumable at any sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from caramba.errors import DataError


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
        self,
        n_windows: int,
        batch_size: int,
        seed: int,
        start: int = 0,
        rank: int = 0,
        world_size: int = 1,
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
        here = (
            window_targets if high - low == n else window_targets[epoch_permutation(n, seed, epoch)[low:high]]
        )
        total += int(here.sum())
    return total


def epoch_permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of n windows in one epoch, int64 [n]: the argsort of n raw PCG64 draws seeded (seed, epoch).

    NumPy keeps raw bit streams the same over versions, which it does not promise of `Generator.permutation`.
    """
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n)
    return np.argsort(keys, kind="stable")
