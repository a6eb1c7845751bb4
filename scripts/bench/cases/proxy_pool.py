"""Jobs of the proxy study over the machine's devices: one process each, which keeps the teacher and compiled code."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cases.proxy_study import Clock


def serve(device: int, state: Path, size: str, work: Callable[..., Any], jobs: Any, results: Any) -> None:
    """Do jobs until None comes; what a job raises goes back as text."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(device)
    from cases.proxy_study import Study  # after the device is chosen

    study = Study(state, size)
    with study.attention():
        while (job := jobs.get()) is not None:
            index, arguments = job
            try:
                results.put((device, index, work(study, *arguments), None))
            except Exception:
                results.put((device, index, None, traceback.format_exc()))


class Pool:
    """Processes with one device each, which do one job at a time in the given order."""

    def __init__(self, n_devices: int, state: Path, size: str, work: Callable[..., Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.results = context.Queue()
        self.queues = [context.Queue() for _ in range(n_devices)]
        self.processes = [
            context.Process(target=serve, args=(device, state, size, work, queue, self.results), daemon=True)
            for device, queue in enumerate(self.queues)
        ]
        for process in self.processes:
            process.start()

    def map(self, jobs: Sequence[tuple[Any, ...]], clock: Clock, seconds: Sequence[float]) -> list[Any]:
        """Return each job's result in order, None for those that failed (the reason is printed) or did not fit.

        A job starts only while its `seconds` are left on the clock; those behind it wait for none.
        """
        found: list[Any] = [None] * len(jobs)
        waiting, idle, busy = list(enumerate(jobs)), list(range(len(self.queues))), 0
        while waiting or busy:
            left = clock.left()
            for index, job in [each for each in waiting if left < seconds[each[0]]]:
                print(f"{left:.0f} s left, a job of {seconds[index]:.0f} s does not fit: {job}", flush=True)
                waiting.remove((index, job))
            while waiting and idle:
                self.queues[idle.pop(0)].put(waiting.pop(0))
                busy += 1
            if not busy:
                break
            device, index, value, failure = self.results.get()
            busy -= 1
            idle.append(device)
            found[index] = value
            if failure:
                print(f"{jobs[index]}: {failure}", flush=True)
        return found

    def close(self) -> None:
        for queue in self.queues:
            queue.put(None)
        end = time.monotonic() + 20
        for process in self.processes:
            process.join(max(end - time.monotonic(), 0.1))
            if process.is_alive():
                process.kill()


@contextmanager
def pool(n_devices: int, state: Path, size: str, work: Callable[..., Any]) -> Iterator[Pool]:
    """A pool that is closed whatever happens."""
    made = Pool(n_devices, state, size, work)
    try:
        yield made
    finally:
        made.close()
