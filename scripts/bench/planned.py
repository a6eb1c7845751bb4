"""What `auto` chooses beside batches set by hand: speed, memory, the time of planning, runs that fit. Writes JSON.

Usage on a GPU: python scripts/bench/planned.py [--repeats 20] [--out docs/benchmarks/planned.json] [-- OVERRIDES]
`--repeats 1 --steps 30 -- model=tiny train.block_size=32` shows on a CPU that the script works.
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
from typing import Any

import torch

from caramba.runs.events import read_events
from caramba.runs.files import write_json

WORDS = [
    *("model=llama32_1b", "model.embedder.vocab_size=2048", "data.vocab_size=2048", "train.block_size=2048"),
    *("train=pretrain", "benchmark=none", "verify=none", "resume=never", "logger.tensorboard=false"),
]
AUTO = ["train.batch_size=auto", "train.activation_checkpointing=auto", "train.compile_model=auto"]
SHARES = (0.125, 0.25, 0.5, 0.75, 1.0, 1.1)  # of the chosen batch: what a hand would try


def launch(words: list[str], folder: Path, cache: Path) -> dict[str, Any]:
    """Run a launch in a folder of its own and return what it left behind."""
    folder.mkdir()
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "caramba", *words],
        cwd=folder,
        env={**os.environ, "CARAMBA_HOME": str(cache)},
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - began
    (run,) = folder.glob("runs/*/*")
    events = list(read_events(run))
    plan = (
        json.loads((run / "plan.json").read_text())["pretrain"]["decisions"]
        if (run / "plan.json").is_file()
        else {}
    )
    speed = next((event for event in events if event["event"] == "speed"), {})
    return {
        "status": done.returncode,
        "seconds": seconds,
        "said": done.stderr[-500:],
        "planned_s": next((event["seconds"] for event in events if event["event"] == "planned"), 0.0),
        "out_of_memory": sum(event["event"] == "out_of_memory" for event in events),
        "tokens_per_s": speed.get("tokens_per_s"),
        "peak_bytes": speed.get("peak_bytes"),
        "plan": plan,
    }


def main() -> int:
    """Plan, repeat, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/planned.json"))
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    words = [*WORDS, f"train.steps={given.steps}", *given.overrides]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        cache = root / "cache"
        first = launch([*words, *AUTO], root / "first", cache)
        print(f"planned in {first['planned_s']:.1f} s: {first['tokens_per_s']} tokens/s {first['said']}")
        again = [launch([*words, *AUTO], root / f"again{index}", cache) for index in range(given.repeats)]
        chosen = {
            key: first["plan"][key]["value"]
            for key in ("batch_size", "activation_checkpointing", "compile_model")
        }
        by_hand = []
        for size in sorted({max(1, round(share * chosen["batch_size"])) for share in SHARES}):
            fixed = [f"train.{key}={value}" for key, value in (chosen | {"batch_size": size}).items()]
            row = launch([*words, *fixed], root / f"hand{size}", cache)
            by_hand.append(
                {"batch_size": size} | {key: row[key] for key in ("tokens_per_s", "out_of_memory")}
            )
            print(f"by hand: {by_hand[-1]}")
    best = max(row["tokens_per_s"] or 0.0 for row in by_hand if not row["out_of_memory"])
    write_json(
        given.out,
        {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
            "torch": torch.__version__,
            "commit": subprocess.run(
                ["git", "rev-parse", "HEAD"], capture_output=True, text=True
            ).stdout.strip(),
            "command": " ".join(["caramba launch", *words, *AUTO]),
            "chosen": chosen,
            "plan": first["plan"],
            "planning_s": first["planned_s"],
            "planning_again_s": [run["planned_s"] for run in again],
            "tokens_per_s": [run["tokens_per_s"] for run in (first, *again)],
            "out_of_memory": sum(run["out_of_memory"] + (run["status"] != 0) for run in again),
            "by_hand": by_hand,
            "over_best_by_hand": (first["tokens_per_s"] or 0.0) / best if best else None,
        },
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
