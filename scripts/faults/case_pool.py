"""What the fault scripts share: their options, cases in forked processes, and one JSON result.

A case follows from a seed and a number alone, so that results do not depend on the number of processes.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import multiprocessing.connection
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Found = dict[str, Any]
Run = Callable[[int], Found]
Prepare = Callable[[Path], Run]
"""Takes the folder of a process, and returns what runs a case there."""
BATCH = 200
TINY = (
    *(
        "model=tiny",
        "train=pretrain",
        "benchmark=none",
        "verify=none",
        "device=cpu",
        "settings.instrument=none",
    ),
    *("data.max_bytes=200000", "data.vocab_size=400", "model.embedder.vocab_size=400", "train.compile=false"),
    *("train.batch_size=2", "train.block_size=32"),
)
"""The words of a launch that trains in seconds."""


def parser(doc: str | None, *, count: int, cases: str) -> argparse.ArgumentParser:
    """Return a parser of the options that every fault script takes."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--count", type=int, default=count, help=f"{cases} (default {count:,})")
    made.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes (default 2)")
    made.add_argument("--seconds", type=float, help="start no case after this many seconds")
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the result here")
    return made


def main(words: argparse.Namespace, run: Callable[[], Mapping[str, Any]], *bad: str) -> int:
    """Run all cases, print the result and its seconds as JSON, also to the file of `--json`.

    The status is 1 where a key in `bad` has a value.
    """
    began = time.monotonic()
    result = run()
    text = json.dumps({**result, "seconds": round(time.monotonic() - began, 1)}, indent=1)
    print(text)
    if words.json is not None:
        words.json.write_text(f"{text}\n", encoding="utf-8")
    return int(any(result[key] for key in bad))


def limit_memory(more_bytes: int) -> None:
    """Let this process allocate so much more than it has."""
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more_bytes, used + more_bytes))


def tally(outcomes: Iterator[tuple[int, Found]]) -> tuple[collections.Counter[str], dict[str, Any]]:
    """Return how many cases were of each kind, and how many are wrong, with the first of these."""
    kinds: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    for index, found in outcomes:
        kinds[found.get("kind", "died")] += 1
        if found["fault"]:
            wrong.append(f"case {index}: {found['fault']}")
    return kinds, {"wrong": len(wrong), "examples": wrong[:20]}


@dataclass
class _Worker:
    process: Any
    pipe: multiprocessing.connection.Connection
    start: int
    stop: int
    heard: float
    is_ready: bool = False

    def fault(self, is_stuck: bool) -> tuple[int, Found]:
        """Return the outcome of the case in which the process ended."""
        reason = "took too long" if is_stuck else f"process ended: {self.process.exitcode}"
        return self.start, {"outcome": "died", "fault": reason}


def _work(
    prepare: Prepare, start: int, stop: int, end: float, pipe: multiprocessing.connection.Connection
) -> None:
    with tempfile.TemporaryDirectory(prefix="caramba-faults-") as name:
        os.chdir(name)
        run = prepare(Path(name))
        pipe.send((start - 1, None))
        for index in range(start, stop):
            if time.monotonic() > end:
                pipe.send((stop - 1, None))
                break
            pipe.send((index, run(index)))
        os.chdir("/")
    pipe.close()


def outcomes(
    prepare: Prepare,
    first: int,
    count: int,
    jobs: int,
    *,
    stuck_s: float = 600.0,
    batch: int = BATCH,
    seconds: float | None = None,
) -> Iterator[tuple[int, Found]]:
    """Run cases in `jobs` forked processes; yield the number and outcome of each.

    A case that ends its process or takes longer than `stuck_s` has the outcome `died` with a fault; a new process goes
    on behind it. After `seconds` no case begins, and those left are not in the result.
    """
    end = float("inf") if seconds is None else time.monotonic() + seconds
    context = multiprocessing.get_context("fork")
    size = max(1, min(batch, -(-count // max(1, jobs))))
    waiting = [(at, min(at + size, first + count)) for at in range(first, first + count, size)][::-1]
    workers: dict[multiprocessing.connection.Connection, _Worker] = {}
    try:
        while waiting or workers:
            if time.monotonic() > end:
                waiting.clear()
            while waiting and len(workers) < max(1, jobs):
                start, stop = waiting.pop()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(prepare, start, stop, end, theirs))
                process.start()
                theirs.close()
                workers[ours] = _Worker(process, ours, start, stop, time.monotonic())
            for ready in multiprocessing.connection.wait(list(workers), timeout=1.0):
                worker = workers[ready]  # type: ignore[index]
                try:
                    index, found = worker.pipe.recv()
                except (EOFError, ConnectionResetError):
                    worker.process.join()
                    del workers[worker.pipe]
                    if not worker.is_ready:
                        raise RuntimeError(
                            "a process ended before its first case; its error is above"
                        ) from None
                    if worker.start < worker.stop:
                        yield worker.fault(is_stuck=False)
                        waiting += [(worker.start + 1, worker.stop)] if worker.start + 1 < worker.stop else []
                    continue
                worker.start, worker.heard, worker.is_ready = index + 1, time.monotonic(), True
                if found is not None:
                    yield index, found
            for worker in [each for each in workers.values() if time.monotonic() - each.heard > stuck_s]:
                worker.process.kill()
                worker.process.join()
                del workers[worker.pipe]
                yield worker.fault(is_stuck=True)
                waiting += [(worker.start + 1, worker.stop)] if worker.start + 1 < worker.stop else []
    finally:
        for worker in workers.values():
            worker.process.kill()
