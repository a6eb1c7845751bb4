"""Loaders over token windows whose order is a pure function of seed and position, so resuming needs no loader state."""

from __future__ import annotations

import functools
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from caramba.config.train import PhaseConfig
from caramba.data import TokenDataset, WindowSampler, spread_windows
from caramba.distill import Batch
from caramba.errors import DataError
from caramba.runs.exit_codes import STOPPING
from caramba.runtime import Decision

VALIDATION_WINDOWS = 64
READ_BATCHES = 8
WAIT = 0.02  # of a step, for data


class IndexedWindows(Dataset[tuple[Tensor | int, ...]]):
    """Windows with their own index as the last item, by which a teacher's outputs are kept."""

    def __init__(self, windows: TokenDataset | Subset[Batch]) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor | int, ...]:
        return *self.windows[index], index


class TimedLoader(DataLoader):
    """A DataLoader that knows how long the process has waited for batches: `waited_s`, seconds in next()."""

    waited_s = 0.0

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        batches = super().__iter__()
        while True:
            began = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self.waited_s += time.perf_counter() - began
            yield batch


def train_loader(
    dataset: TokenDataset | Subset[Batch],
    phase: PhaseConfig,
    *,
    seed: int,
    start: int,
    pin: bool,
    share: tuple[int, int] = (0, 1),
) -> TimedLoader:
    """Return an endless loader of (x, y) [batch_size, block_size] int64 that begins at global sample `start`.

    `share` is (this rank, ranks) of those that share the data. Where the teacher's outputs are stored a batch also
    holds the samples' indices [batch_size].

    Raises:
        DataError: the dataset has no window of `block_size` tokens.
    """
    if len(dataset) == 0:
        raise DataError(
            f"train data: shorter than one window of block_size={phase.block_size} + 1 tokens; "
            "use more data or a smaller block_size"
        )
    assert isinstance(phase.batch_size, int)
    sampler = WindowSampler(len(dataset), phase.batch_size, seed=seed, start=start, rank=share[0], world_size=share[1])
    windows = IndexedWindows(dataset) if phase.stores_teacher else dataset
    assert isinstance(phase.num_workers, int)
    return TimedLoader(
        windows,
        batch_sampler=sampler,
        num_workers=phase.num_workers,
        pin_memory=pin,
        worker_init_fn=_outlive_signals if phase.num_workers else None,
    )


def _outlive_signals(_: int) -> None:
    """A signal to a whole SLURM step reaches the loader's workers too, and the step that the run ends with needs them.

    Ctrl-C, which a terminal sends to all of them, is their parent's alone. They end with their loader, or when their
    parent is gone; a second SIGTERM is their parent's own.
    """
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)

    def once(_: int, __: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, once)


def windows_at(dataset: TokenDataset | Subset[Batch], *, seed: int, start: int, samples: int) -> list[int]:
    """Return the dataset's windows that `samples` samples of the stream from `start` on are, of all ranks."""
    sampler = WindowSampler(len(dataset), samples, seed=seed, start=start)
    return [sampler.window(start + place) for place in range(samples)]


def workers_needed(dataset: TokenDataset | Subset[Batch], phase: PhaseConfig, micro_step_s: float) -> Decision:
    """Decide how many processes read data, so that a micro-step of `micro_step_s` seconds waits under 2% for its batch.

    Without processes reading is part of the step; with w of them a batch is read in 1/w of its time, concurrently.
    """
    loader = iter(train_loader(dataset, phase.model_copy(update={"num_workers": 0}), seed=0, start=0, pin=False))
    next(loader)
    seconds = []
    for _ in range(READ_BATCHES):
        began = time.perf_counter()
        next(loader)
        seconds.append(time.perf_counter() - began)
    read_s = statistics.median(seconds)
    enough = next((w for w in (1, 2, 4, 8) if read_s / w <= micro_step_s), 8)
    workers = 0 if read_s <= WAIT * micro_step_s else min(enough, max(1, (os.cpu_count() or 1) - 1))
    return Decision(
        workers,
        f"auto: a batch is read in {read_s * 1e3:.2f} ms, a micro-step takes {micro_step_s * 1e3:.2f} ms",
        {"read_seconds": read_s, "micro_step_seconds": micro_step_s},
    )


def targets_per_window(dataset: TokenDataset | Subset[Batch]) -> np.ndarray:
    """Return how many targets count in each window, int64 [n_windows]: padding does not."""
    if isinstance(dataset, Subset):
        assert isinstance(dataset.dataset, TokenDataset)
        return dataset.dataset.window_targets[np.asarray(dataset.indices)]
    return dataset.window_targets


def mean_targets(
    targets: np.ndarray, *, seed: int, start: int, samples: int, batches: int
) -> Callable[[int], float] | None:
    """Return a function of the optimiser step: the mean targets per micro-batch, at least 1 in a whole step.

    None where all micro-batches have equal weight: a step has one batch, or all windows have as many targets.

    Args:
        targets: targets that count in each window, int64 [n_windows].
        start: position of the stream at which step 0 begins.
        samples: of a step, all micro-batches of all ranks.
        batches: micro-batches of a step, of all ranks.
    """
    if batches == 1 or not targets.size or targets.min() == targets.max():
        return None
    sampler = WindowSampler(len(targets), samples, seed=seed)  # keeps the order of its epoch

    @functools.lru_cache(maxsize=1)  # every micro-batch of a step asks, and an epoch's order takes a sort
    def of(step: int) -> float:
        first = start + step * samples
        total = sum(int(targets[sampler.window(first + place)]) for place in range(samples))
        return max(1, total) / batches

    return of


def validation_loader(dataset: TokenDataset, phase: PhaseConfig) -> DataLoader:
    """Return a loader of up to 64 held-out windows, spread over the split, the same at every validation."""
    assert isinstance(phase.batch_size, int)
    return DataLoader(Subset(dataset, spread_windows(len(dataset), VALIDATION_WINDOWS)), batch_size=phase.batch_size)
