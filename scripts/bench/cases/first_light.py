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
OPTIONS = "overrides*"


def run(options: argparse.Namespace, record: Record) -> None:
    kind = record.device.type
    record.default(f"first_light_{kind}.json")
    words = [f"device={kind}", *options.overrides]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "CARAMBA_HOME": str(Path(folder) / "cache")}
        began = time.perf_counter()
        command = [sys.executable, "-m", "caramba.launch", *words]
        subprocess.run(command, cwd=folder, env=environment, check=True)
        wall = time.perf_counter() - began
        (report,) = Path(folder).glob("runs/*/*/artifacts/report.json")
        data = json.loads(report.read_text())
    facts, metrics = data["plan"]["pretrain"]["facts"], data["metrics"]
    name = facts["name"] if kind == "cuda" else f"{facts['threads']} CPU threads"
    kv_bytes = "memory.{}.kv_bytes_per_token@"
    start = kv_bytes.format("teacher")
    last = [key.removeprefix(start) for key in metrics if key.startswith(start) and "fp16" in key][-1]
    record.start({"platform": platform.platform(), "torch": facts["torch"], "device": name})
    record.save(
        command=" ".join(["python -m caramba.launch", *words]),
        device=name,
        wall_s=wall,
        kv_key=kv_bytes + last,
        metrics={key: item for key, item in metrics.items() if key.startswith(KEPT)},
        **{key: data[key] for key in ("labels", "phases", "verify")},
    )
    print(f"{wall:.0f} s; wrote {record.out}")
