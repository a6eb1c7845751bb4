"""How long the commands take that a user waits for, in fresh processes. Writes JSON.

Usage: python scripts/bench/run.py launch_times [--repeats 5] [--out FILE]   (on an idle machine)
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from record import Record, machine_facts

LAUNCH = ["-m", "caramba.launch"]
COMPILE = ["-m", "caramba", "compile", "model=llama32_dba", "train=blockwise", "--print-plan"]
STEP = [*LAUNCH, "train=pretrain", "model=tiny", "train.steps=1", "benchmark=none", "resume=never"]
GENERATE = ["-m", "caramba", "generate", "latest", "--prompt", "def", "--max-new-tokens", "1"]
EXPORT = ["-m", "caramba", "export", "latest", "--out", "exported"]


@dataclass(frozen=True)
class Times:
    """Seconds until the effect, and of processor time over the whole command, which a busy machine stretches less."""

    wall_s: float
    cpu_s: float


def until_its_end(command: list[str], folder: Path) -> Times:
    """Time a command until it has ended."""
    shutil.rmtree(folder / "exported", ignore_errors=True)
    before, began = os.times(), time.perf_counter()
    subprocess.run([sys.executable, *command], cwd=folder, check=True, capture_output=True)
    wall, after = time.perf_counter() - began, os.times()
    used = after.children_user - before.children_user + after.children_system - before.children_system
    return Times(wall, used)


def until_first_step(command: list[str], folder: Path) -> Times:
    """Time a launch until the first optimiser step of its run was logged."""
    before = set(folder.glob("runs/*/*"))
    began = time.time()
    cpu = until_its_end(command, folder).cpu_s
    (run,) = set(folder.glob("runs/*/*")) - before
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    logged = next(event["time"] for event in events if event["event"] == "metrics")
    return Times(logged - began, cpu)


END, FIRST_STEP = "its end", "the first training step, warm token cache"
CASES: list[tuple[list[str], str, float]] = [
    ([*LAUNCH, "--help"], END, 0.5),
    (COMPILE, END, 2.0),
    ([*LAUNCH, "--cfg", "job"], END, 2.0),
    (["-m", "caramba", "status"], END, 2.0),
    (STEP, FIRST_STEP, 14.0),
    (GENERATE, END, 6.0),
    (EXPORT, END, 6.0),
]


def shown(command: list[str]) -> str:
    """Return the words that a user types."""
    words = " ".join(command)
    return words[3:] if words.startswith("-m caramba ") else f"python {words}"


OPTIONS = "--repeats=5"


def run(options: argparse.Namespace, record: Record) -> None:
    record.start(machine_facts())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["CARAMBA_HOME"] = str(folder / "cache")
        until_first_step(STEP, folder)  # builds the token cache, and warms the file system's
        for command, what, limit in CASES:
            measure = until_first_step if what == FIRST_STEP else until_its_end
            measure(command, folder)
            times = [measure(command, folder) for _ in range(options.repeats)]
            wall, cpu = [item.wall_s for item in times], [item.cpu_s for item in times]
            row = {"command": shown(command), "what": what, "limit_s": limit}
            row |= {"median_s": statistics.median(wall), "all_s": wall}
            record.add(row | {"median_cpu_s": statistics.median(cpu), "all_cpu_s": cpu}, "commands")
