from __future__ import annotations

import multiprocessing
import os
import signal
import time
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from caramba.config.train import PhaseConfig
from caramba.train.data import TimedLoader, train_loader
from caramba.train.throughput import PhaseMeter, Work

PHASE = PhaseConfig(phase="pretrain", steps=4, batch_size=3, block_size=4, num_workers=0)


class Windows(Dataset):
    """Twenty windows that hold their own number; `delay` seconds each."""

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.delay)
        return torch.full((4,), index), torch.full((4,), index + 1)


def batches(workers: int, start: int, count: int, share: tuple[int, int] = (0, 1)) -> list[torch.Tensor]:
    phase = PHASE.model_copy(update={"num_workers": workers})
    loader = train_loader(Windows(), phase, seed=5, start=start, pin=False, share=share)  # type: ignore[arg-type]
    return [x for x, _ in islice(loader, count)]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker")
def test_resuming_in_the_middle_of_an_epoch_is_batch_for_batch_with_and_without_workers() -> None:
    whole = batches(0, 0, 10)  # an epoch and a half
    assert torch.equal(torch.cat(batches(4, 0, 10)), torch.cat(whole))
    for workers in (0, 4):
        assert torch.equal(torch.cat(batches(workers, 3 * 4, 6)), torch.cat(whole[4:]))
        for rank in (0, 1):  # two ranks take the batches of that stream in turn
            found = batches(workers, 3 * 4, 3, share=(rank, 2))
            assert torch.equal(torch.cat(found), torch.cat(whole[4 + rank :: 2]))


def test_a_slow_feed_shows_in_the_share_of_waiting() -> None:
    loader = train_loader(Windows(delay=0.05), PHASE, seed=5, start=0, pin=False)  # type: ignore[arg-type]
    assert isinstance(loader, TimedLoader)
    meter = PhaseMeter(Work(12), waited=lambda: loader.waited_s)
    feed = iter(loader)
    next(feed)
    meter.start(0)
    before = loader.waited_s
    for _ in range(4):
        next(feed)
    share = meter.read(4)["data_wait_share"]
    assert loader.waited_s - before >= 4 * 3 * 0.05
    assert share > 0.9
    meter.start(4)
    time.sleep(0.02)  # training, with nothing to wait for
    assert meter.read(5)["data_wait_share"] == 0.0


def test_a_phase_that_waited_is_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    from caramba.experiment.stages import log_throughput

    log_throughput("pretrain", {"tokens_per_s": 1234.0, "data_wait_share": 0.43, "mfu": 0.5})
    said = capsys.readouterr()
    assert "pretrain: 1,234 tokens/s, 50.0% MFU" in said.out
    assert "waited for data 43% of the time; raise train.num_workers" in said.err
    log_throughput("pretrain", {"tokens_per_s": 1234.0, "data_wait_share": 0.01})
    assert "waited" not in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_are_pinned_on_cuda(tmp_path: Path) -> None:
    loader = train_loader(Windows(), PHASE, seed=5, start=0, pin=True)  # type: ignore[arg-type]
    assert next(iter(loader))[0].is_pinned()


def test_signals_to_a_whole_job_leave_the_loaders_workers_at_work() -> None:
    """SLURM tells every process of a step: the state that is then saved is that of a step which needs its batch."""
    phase = PHASE.model_copy(update={"num_workers": 1})
    feed = iter(train_loader(Windows(), phase, seed=5, start=0, pin=False))  # type: ignore[arg-type]
    next(feed)
    (worker,) = multiprocessing.active_children()
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        os.kill(worker.pid or 0, number)
    for _ in range(4):  # more than were fetched before
        next(feed)
    # torch's handler raises for a worker that was killed, unless join comes to know of its end first.
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        os.kill(worker.pid or 0, signal.SIGTERM)  # a second one is its parent's, at the end
        worker.join(60)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert worker.exitcode == -signal.SIGTERM
