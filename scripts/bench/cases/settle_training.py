"""All figures of training on a GPU by one command, called as often as it takes: each call goes on where the last ended.

In order: training (bf16 at both shapes, the profile, float8, masters, the long sequence), planned and ladder.
Files lie in --folder, which has to outlast a call, and are copied to --copy after every script.

Usage: python scripts/bench/run.py settle_training [--seconds 570] [--folder runs/bench] [--copy DIR]
`--smoke` runs planned and ladder for a minute each, `--size tiny --only training` shows on a CPU that it works.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

from record import Record

OUT = None
RUN = Path(__file__).parents[1] / "run.py"
SCRIPTS = ("training", "planned", "ladder")
TRAINING = ("--parts", "bf16,profile,fp8,masters,long")
SMOKE = ("planned", "ladder")
LADDERS = {"1b": "1b_quarter", "tiny": "tiny"}  # by size: 1b's whole ladder takes several calls of its own
LOADING_S = 20.0  # what a script takes to load its libraries, before its seconds begin
CLOSING_S = 12.0  # what it takes to end and write after them
LEAST_S = 45.0  # with less left the next script would do nothing else


def command_of(script: str, size: str, folder: Path, seconds: float, is_smoke: bool) -> list[str]:
    """Return the command line of one script with so many seconds."""
    words = [sys.executable, str(RUN), script, "--seconds", f"{seconds:.0f}"]
    words += ["--out", str(folder / f"{script}.json")]
    if script == "training":
        words += [*TRAINING, "--size", size, "--trace", str(folder / "training.trace.json.gz")]
        return [*words, "--steps", "2", "--turns", "2"] if size == "tiny" else words
    words += ["--work", str(folder / script)]
    if is_smoke:
        return [*words, "--smoke"]
    return [*words, "--size", LADDERS[size]] if script == "ladder" else words


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=570.0)
    parser.add_argument("--size", default="1b", choices=("1b", "tiny"))
    parser.add_argument("--only")
    parser.add_argument("--smoke", action="store_true", help=f"a minute each of {', '.join(SMOKE)}")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"))
    parser.add_argument("--copy", type=Path, help="where the JSON files and plots are copied to")


def run(given: argparse.Namespace, record: Record) -> int | None:
    deadline, folder = time.monotonic() + given.seconds, given.folder.absolute()
    if given.smoke:
        folder /= "smoke"  # whose figures are none to keep
    only = given.only or ",".join(SMOKE if given.smoke else SCRIPTS)
    folder.mkdir(parents=True, exist_ok=True)
    statuses = []
    for script in only.split(","):
        left = deadline - time.monotonic() - CLOSING_S
        if left < LEAST_S:
            print(f"== {script}: not begun, {left:.0f} s are left", flush=True)
            continue
        print(f"== {script}: {left:.0f} s", flush=True)
        try:
            done = subprocess.run(
                command_of(script, given.size, folder, left - LOADING_S, given.smoke),
                timeout=left + CLOSING_S / 2,
            )
            statuses.append(done.returncode)
        except (
            subprocess.TimeoutExpired
        ):  # what it has written is whole, and the next call goes on from there
            print(f"== {script}: ended, its part takes longer than what was left", flush=True)
            statuses.append(1)
        if given.copy is not None:
            given.copy.mkdir(parents=True, exist_ok=True)
            for path in sorted(folder.iterdir()):
                if path.suffix in (".json", ".md", ".png"):
                    shutil.copy2(path, given.copy / path.name)
    return max(statuses, default=0)
