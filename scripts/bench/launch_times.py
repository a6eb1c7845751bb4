"""How long the commands take that a user waits for, in fresh processes. Writes JSON.

Usage: python scripts/bench/launch_times.py [--repeats 5] [--out FILE]   (on an idle machine)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from caramba.runs.files import write_json

LAUNCH = ["-m", "caramba.launch"]
COMPILE = ["-m", "caramba", "compile", "model=llama32_dba", "train=blockwise", "--print-plan"]
STEP = [*LAUNCH, "train=pretrain", "model=tiny", "train.steps=1", "benchmark=none"]


def wall(command: list[str], folder: Path) -> float:
    """Seconds until the command has ended."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *command], cwd=folder, check=True, capture_output=True)
    return time.perf_counter() - began


def until_first_step(folder: Path) -> float:
    """Seconds from launch until the first optimiser step of a real run was logged."""
    before = set(folder.glob("runs/*/*"))
    began = time.time()
    subprocess.run([sys.executable, *STEP], cwd=folder, check=True, capture_output=True)
    (run,) = set(folder.glob("runs/*/*")) - before
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return next(event["time"] for event in events if event["event"] == "metrics") - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/launch_times.json"))
    options = parser.parse_args()
    out = options.out.absolute()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["CARAMBA_HOME"] = str(folder / "cache")
        until_first_step(folder)  # builds the token cache, and warms the file system's
        cases = [
            ("python -m caramba.launch --help", "its end", 0.5, lambda: wall([*LAUNCH, "--help"], folder)),
            (f"caramba {' '.join(COMPILE[2:])}", "its end", 2.0, lambda: wall(COMPILE, folder)),
            (
                f"python {' '.join(STEP)}",
                "the first training step, warm token cache",
                14.0,
                lambda: until_first_step(folder),
            ),
        ]
        commands = []
        for command, what, limit, measure in cases:
            measure()
            seconds = [measure() for _ in range(options.repeats)]
            commands.append(
                {
                    "command": command,
                    "what": what,
                    "limit_s": limit,
                    "median_s": statistics.median(seconds),
                    "all_s": seconds,
                }
            )
            print(f"{statistics.median(seconds):6.2f} s  {command}")
    write_json(
        out,
        {
            "benchmark": "launch_times",
            "made_by": "python scripts/bench/launch_times.py",
            "machine": {
                "platform": platform.platform(),
                "cores": os.cpu_count(),
                "python": platform.python_version(),
            },
            "commands": commands,
        },
    )


if __name__ == "__main__":
    main()
