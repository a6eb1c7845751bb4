"""The ranks of `launcher=inline` with parallel=ddp or fsdp2: one worker per device of this machine, on one manifest."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from caramba.config.manifest import Manifest
from caramba.launch.pool import termination_as_interrupt
from caramba.launch.slots import available_cores, visible_gpus
from caramba.runs.ending import INTERRUPTED

POLL_S = 0.05
GRACE_S = 10.0  # a rank that is told to stop and does not is ended


def ranks_here(manifest: Manifest) -> int:
    """Return how many workers a run needs here: 1 where a launcher has started them already (WORLD_SIZE)."""
    parallel = manifest.parallel
    if parallel.strategy == "single" or "WORLD_SIZE" in os.environ:
        return 1
    if parallel.ranks is not None:
        return parallel.ranks
    gpus = visible_gpus() if manifest.device in ("auto", "cuda") else []
    return max(1, len(gpus) // parallel.tp * parallel.tp)


def run_ranks(manifest_file: Path, size: int, flags: list[str]) -> int:
    """Run `size` workers on one frozen manifest and return the exit status: that of the first that fails.

    Rank 0 writes to this terminal; what others print on stderr is shown too. When one fails the rest are stopped.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, available_cores() // size))
    workers: list[subprocess.Popen[bytes]] = []
    with termination_as_interrupt():
        try:
            for rank in range(size):
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
                meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": threads}
                variables = {key: str(value) for key, value in {**place, **meeting}.items()}
                workers.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "caramba.worker", str(manifest_file), *flags],
                        env={**os.environ, **variables},
                        stdout=None if rank == 0 else subprocess.DEVNULL,
                    )
                )
            return _wait(workers)
        except KeyboardInterrupt:
            return INTERRUPTED
        finally:
            _stop(workers)


def _wait(workers: list[subprocess.Popen[bytes]]) -> int:
    while True:
        ended = [status for worker in workers if (status := worker.poll()) is not None]
        failed = next((status for status in ended if status), None)
        if failed is not None:
            return failed if failed > 0 else 128 - failed
        if len(ended) == len(workers):
            return 0
        time.sleep(POLL_S)


def _stop(workers: list[subprocess.Popen[bytes]]) -> None:
    """End what still runs: by asking, then by force."""
    running = [worker for worker in workers if worker.poll() is None]
    for worker in running:
        worker.terminate()
    limit = time.monotonic() + GRACE_S
    for worker in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(max(0.1, limit - time.monotonic()))
        if worker.poll() is None:
            worker.kill()
            worker.wait()
