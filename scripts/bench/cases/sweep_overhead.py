"""A sweep of tiny points with launcher=process against the bare runs, and the memory of its front end. Writes JSON.

Usage: python scripts/bench/run.py sweep_overhead [--points 64] [--jobs 2] [--out FILE]   (on an idle machine)

Bare runs are `python -m caramba.launch` per point, as many at a time as the sweep has workers; a pool of threads only
waits for them. The front end's memory is its peak resident set after it has checked 8 points and after all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from record import Record, machine_facts

WORDS = [
    *("model=tiny", "train=pretrain", "verify=none", "benchmark=none", "device=cpu"),
    *("data.max_bytes=400000", "data.vocab_size=512", "model.embedder.vocab_size=512"),
    *("train.steps=20", "train.batch_size=2", "train.block_size=32", "settings.instrument=none"),
]
# Composes all points, as a sweep does before it starts one, and prints its peak memory in KiB meanwhile.
FRONT_END = """
import gc, resource, sys
from caramba.launch.sweeps.grid import check_point
kept = []
for number in range(int(sys.argv[1])):
    kept.append(check_point([*sys.argv[2:], f"seed={number}"], ())[1])
    if number % 8 == 0:
        gc.collect()
    if number + 1 in (8, int(sys.argv[1])):
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def environment(jobs: int) -> dict[str, str]:
    """One thread per core, the same for the sweep's workers and for the bare runs."""
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    return {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


def sweep_seconds(folder: Path, points: int, jobs: int, *more: str) -> tuple[float, int]:
    """Seconds of a whole sweep from command to exit, and the peak memory of its front end alone in KiB.

    `more` are overrides. What the kernel reports of an ended process would count its workers in, so it is read before.
    """
    words = [*WORDS, *more, f"seed=range({points})", "launcher=process", f"launcher.n_jobs={jobs}"]
    log, peak = folder / "sweep.log", 0
    began = time.perf_counter()
    with open(log, "w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "caramba.launch", "-m", *words],
            cwd=folder,
            env=environment(jobs),
            stderr=stderr,
        )
        while process.poll() is None:
            peak = max(peak, peak_kib(process.pid))
            time.sleep(0.1)
    seconds = time.perf_counter() - began
    if process.returncode:
        raise SystemExit(log.read_text())
    return seconds, peak


def peak_kib(pid: int) -> int:
    """Peak resident memory of a running process so far in KiB, 0 where it cannot be read."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def bare_seconds(folder: Path, points: int, jobs: int) -> float:
    """Seconds of the same runs, each started by itself."""

    def one(seed: int) -> None:
        command = [sys.executable, "-m", "caramba.launch", *WORDS, f"seed={seed}"]
        subprocess.run(command, cwd=folder, env=environment(jobs), check=True, capture_output=True)

    began = time.perf_counter()
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, range(points)))
    return time.perf_counter() - began


def front_end_kib(folder: Path, points: int) -> list[int]:
    """Peak memory of a process that checks the points, after 8 and after all of them, in KiB."""
    done = subprocess.run(
        [sys.executable, "-c", FRONT_END, str(points), *WORDS],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    return [int(line) for line in done.stdout.split()]


def cpu_seconds() -> float:
    """CPU seconds of all processes that have been waited for, their children with them: less moved by other load."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(folder: Path, points: int, jobs: int) -> dict[str, float | int | list[int]]:
    """Measure a sweep and the bare runs, in separate folders with one warm token cache."""
    os.environ["CARAMBA_HOME"] = str(folder / "cache")
    for name in ("warm", "sweep", "bare"):
        (folder / name).mkdir()
    bare_seconds(folder / "warm", 1, 1)
    clock = cpu_seconds()
    swept, peak = sweep_seconds(folder / "sweep", points, jobs)
    swept_cpu, clock = cpu_seconds() - clock, cpu_seconds()
    bare = bare_seconds(folder / "bare", points, jobs)
    bare_cpu = cpu_seconds() - clock
    return {
        "points": points,
        "jobs": jobs,
        "sweep_s": swept,
        "bare_s": bare,
        "overhead": swept / bare - 1,
        "sweep_cpu_s": swept_cpu,
        "bare_cpu_s": bare_cpu,
        "overhead_cpu": swept_cpu / bare_cpu - 1,
        "front_end_peak_kib": peak,
        "checking_peak_kib": front_end_kib(folder, points),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--points", type=int, default=64)
    parser.add_argument("--jobs", type=int, default=2)


def run(options: argparse.Namespace, record: Record) -> int | None:
    with tempfile.TemporaryDirectory() as name:
        found = measure(Path(name), options.points, options.jobs)
    print(json.dumps(found, indent=2))
    record.write_data(
        {
            **record.head(machine_facts()),
            "load_before": os.getloadavg()[0],
            "result": found,
        },
    )
