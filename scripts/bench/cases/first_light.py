"""Run the default experiment in an empty folder and keep its report, with the wall time. Writes JSON.

Usage: python scripts/bench/run.py first_light [--device cpu|cuda] [--out FILE] [overrides...]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import Record

KEPT = ("perplexity.", "latency.", "memory.", "verify.", "ratio.")


OUT = None  # a file a device


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("overrides", nargs="*")


def run(options: argparse.Namespace, record: Record) -> int | None:
    record.default(f"first_light_{options.device}.json")
    words = [f"device={options.device}", *options.overrides]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "CARAMBA_HOME": str(Path(folder) / "cache")}
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "caramba.launch", *words], cwd=folder, env=environment, check=True
        )
        wall = time.perf_counter() - began
        (report,) = Path(folder).glob("runs/*/*/artifacts/report.json")
        data = json.loads(report.read_text())
    facts = data["plan"]["pretrain"]["facts"]
    name = facts["name"] if options.device == "cuda" else f"{facts['threads']} CPU threads"
    sequences = [
        key.split("@")[1] for key in data["metrics"] if key.startswith("memory.teacher.kv_bytes_per_token@")
    ]
    last = next(item for item in reversed(sequences) if "fp16" in item)
    record.write_data(
        {
            **record.head({"platform": platform.platform(), "torch": facts["torch"], "device": name}),
            "command": " ".join(["python -m caramba.launch", *words]),
            "device": name,
            "wall_s": wall,
            "kv_key": "memory.{}.kv_bytes_per_token@" + last,
            "labels": data["labels"],
            "phases": data["phases"],
            "metrics": {key: item for key, item in data["metrics"].items() if key.startswith(KEPT)},
            "verify": data["verify"],
        },
    )
    print(f"{wall:.0f} s; wrote {record.out}")
    return 0
