"""A sweep of plain run folders for the studio's tests: three rates, two widths, three seeds, and a run half written."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from caramba.runs.annotations import Annotations, write_annotations

STEPS, EVERY = 200, 5


def make_sweep(root: Path) -> None:
    """Write 18 runs that look like those of a sweep, and one that was cut short."""
    cases = [(lr, width, seed) for lr in (0.001, 0.002, 0.004) for width in (16, 32) for seed in (1, 2, 3)]
    for number, (lr, width, seed) in enumerate(cases):
        make_run(root / "demo" / f"20260102-0304{number:02d}-ab{number:02d}cd", lr, width, seed)
    torn = root / "demo" / "20260102-030500-torn"
    torn.mkdir()
    (torn / "manifest.json").write_text('{"name": ')
    noted = root / "demo" / "20260102-030402-ab02cd"
    write_annotations(noted, Annotations(["best"], "=SUM(A1)"))


def make_run(folder: Path, lr: float, width: int, seed: int) -> None:
    train = {"steps": STEPS, "batch_size": 8, "block_size": 128, "gradient_accumulation_steps": 1, "lr": lr}
    (folder / "artifacts").mkdir(parents=True)
    write(
        folder / "manifest.json",
        {
            "name": "demo",
            "seed": seed,
            "model": {"d_model": width},
            "groups": [{"name": "main", "runs": [{"id": "global", "train": train}]}],
        },
    )
    (folder / "overrides.txt").write_text(f"train.lr={lr}\nmodel.width={width}\nseed={seed}\n")
    write(folder / "env.json", {"git_commit": "0123abc", "git_is_clean": True})
    noise = random.Random(1000 * lr * width + seed)
    floor = 2.4 + 60 * abs(lr - 0.002) - width / 100
    lines = [{"time": 0.0, "event": "phase_started", "phase": "global", "step": 0, "earlier_s": 0.0}]
    for step in range(EVERY, STEPS + 1, EVERY):
        loss = floor + 4 * math.exp(-step / 40) + 0.05 * noise.random()
        values = {"running_loss": loss, "lr": lr * (1 - step / STEPS), "tokens_per_s": 2048 + noise.random()}
        values |= {"val_loss": loss + 0.1} if step % 50 == 0 else {}
        lines.append({"time": step / 2, "event": "metrics", "phase": "global", "step": step, "values": values})
    lines.append({"time": 200.0, "event": "run_finished"})
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    loss = floor + 0.02 * noise.random()
    metrics = {
        "perplexity.student.perplexity": measured(math.exp(loss), 0.2, 256),
        "ratio.perplexity": measured(math.exp(loss - 2.0), 0.01, 256),
        "memory.student.kv_bytes_per_token@seq=128,kind=fp16": measured(64.0 * width, None, None),
    }
    write(folder / "artifacts" / "report.json", {"metrics": metrics, "phases": [], "labels": {}})
    write(folder / "result.json", {"status": "finished"})


def measured(value: float, error: float | None, n: int | None) -> dict[str, object]:
    return {"value": value, "unit": "", "std": None, "standard_error": error, "n": n}


def write(file: Path, content: object) -> None:
    file.write_text(json.dumps(content))
