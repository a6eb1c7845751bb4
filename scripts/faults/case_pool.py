"""What the fault scripts share: their options, cases in forked processes, and one JSON result.

A case follows from a seed and a number alone, so that results do not depend on the number of processes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Found = dict[str, Any]
Prepare = Callable[[Path], Callable[[int], Found]]
"""Takes the folder of a process, and returns what runs a case there."""
TINY = (
    *("model=tiny", "train=pretrain", "benchmark=none", "verify=none", "device=cpu"),
    *("settings.instrument=none", "data.max_bytes=200000", "data.vocab_size=400"),
    *("model.embedder.vocab_size=400", "train.compile=false", "train.batch_size=2", "train.block_size=32"),
)
"""The words of a launch that trains in seconds."""
POOL = (("--jobs", min(2, os.cpu_count() or 1)), ("--seconds", float("inf")))
"""Options of `outcomes`."""


def main(
    doc: str | None,
    run: Callable[[argparse.Namespace], Mapping[str, Any]],
    options: Iterable[tuple[str, Any]],
    *bad: str,
) -> int:
    """Run all cases, print the result and its seconds as JSON, also to the file of `--json`.

    Args:
        options: each a name and its default: a number, or a list of words.
        bad: keys of the result; the status is 1 where one of them has a value.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--seed", 1), *options):
        more: dict[str, Any] = {"nargs": "*"} if isinstance(default, tuple) else {"type": type(default)}
        parser.add_argument(name, default=default, help=f"default: {default}", **more)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result here")
    words = parser.parse_args()
    began = time.monotonic()
    result = run(words)
    text = json.dumps({**result, "seconds": round(time.monotonic() - began, 1)}, indent=1)
    print(text)
    if words.json is not None:
        words.json.write_text(f"{text}\n", encoding="utf-8")
    return int(any(result[key] for key in bad))


def outcomes(
    prepare: Prepare,
    count: int,
    jobs: int,
    *,
    first: int = 0,
    batch: int = 200,
    stuck_s: float = 600.0,
    seconds: float = float("inf"),
) -> Iterator[tuple[int, Found]]:
    """Run cases in `jobs` forked processes, each in an empty folder; yield the number and outcome of each.

    A process takes `batch` cases, one after the other. A case that ends its process, or takes longer than `stuck_s`,
    has a fault, and a new process resumes after it. After `seconds` no case begins, and those left are not
    in the result.
    """
    context, end = multiprocessing.get_context("fork"), time.monotonic() + seconds
    size = max(1, min(batch, -(-count // max(1, jobs))))
    stop = first + count
    waiting = [list(range(at, min(at + size, stop))) for at in range(first, stop, size)][::-1]
    running: dict[Any, _Worker] = {}
    try:
        while waiting or running:
            while waiting and len(running) < max(1, jobs):
                numbers = waiting.pop()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(prepare, list(numbers), end, theirs))
                process.start()
                theirs.close()
                running[ours] = _Worker(numbers, process, time.monotonic())
            for pipe in multiprocessing.connection.wait(list(running), timeout=1.0):
                worker = running[pipe]
                try:
                    found = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    worker.process.join()
                    found = {"fault": f"process ended: {worker.process.exitcode}"}
                    del running[pipe]
                    waiting += [worker.numbers[1:]] if worker.numbers[1:] else []
                worker.heard = time.monotonic()
                if found is None:
                    worker.numbers.clear()
                elif worker.numbers:
                    yield worker.numbers.pop(0), found
            for worker in running.values():
                if time.monotonic() - worker.heard > stuck_s:
                    worker.process.kill()  # its pipe ends, and the fault has its exit code
    finally:
        for worker in running.values():
            worker.process.kill()


@dataclass
class _Worker:
    numbers: list[int]
    process: Any
    heard: float


def _work(
    prepare: Prepare,
    numbers: list[int],
    end: float,
    pipe: multiprocessing.connection.Connection,
) -> None:
    with tempfile.TemporaryDirectory(prefix="caramba-faults-") as name:
        os.chdir(name)
        case = prepare(Path(name))
        for number in numbers:
            pipe.send(case(number) if time.monotonic() < end else None)
        os.chdir("/")
    pipe.close()
