"""Tiny training recipes whose losses are on record, and the process that runs them.

Every recipe trains on the bytes of `text.txt` for 20 steps on the CPU with one thread. The environment pins the
instruction sets of ATen, MKL and oneDNN, so that the last digit does not depend on the processor.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.integration.commands import leave_blank

FOLDER = Path(__file__).parent
TEXT = FOLDER / "text.txt"
LOSSES = FOLDER / "losses.json"
STEPS = 20
COLUMNS = ("loss", "running_loss", "grad_norm")
PINNED = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "OMP_NUM_THREADS": "1",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
}

STUDENT = ("model.teacher.manifest.embedder.vocab_size=256", "~train.phases.teacher_continued")
RECIPES: dict[str, tuple[str, ...]] = {
    "pretrain": ("model=tiny", "train=pretrain"),
    "pretrain_accumulated_bfloat16": (
        *("model=tiny", "train=pretrain", "train.dtype=bfloat16"),
        *("train.gradient_accumulation_steps=2", "train.activation_checkpointing=full"),
    ),
    "pretrain_decoupled": ("model=decoupled", "train=pretrain"),
    "pretrain_muon": ("model=tiny", "train=pretrain", "train.optimizer=muon", "train.scheduler=wsd"),
    "upcycle_latent": ("model=tiny_dba", "train=upcycle", *STUDENT),
    "upcycle_per_head": ("model=tiny_dba_per_head", "train=upcycle", *STUDENT),
}
SHARED = (
    *("device=cpu", "benchmark=none", "verify=none", "logger.tensorboard=false", "data=tokens"),
    *("model.embedder.vocab_size=256", f"train.steps={STEPS}", "train.batch_size=2", "train.block_size=32"),
    *("train.warmup_steps=5", "resume=never"),
)


def run_recipes(folder: Path, names: list[str] | None = None) -> dict[str, dict[str, dict[str, float]]]:
    """Train the recipes in a process with the pinned environment.

    Returns recipe -> `phase/step` -> column -> value, as `losses.json` stores it.

    Raises:
        RuntimeError: A recipe failed; the message has its output.
    """
    command = [sys.executable, "-m", "tests.golden.recipes", str(folder), *(names or RECIPES)]
    variables = {**os.environ, **PINNED, "CARAMBA_HOME": str(folder / "home")}
    root = str(FOLDER.parents[1])
    done = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"golden recipes exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return json.loads((folder / "measured.json").read_text())


def here() -> dict[str, str]:
    """Return what the last digits depend on."""
    import torch

    return {
        "torch": torch.__version__.partition("+")[0],
        "machine": platform.machine(),
        "processor": _processor(),
    }


def _processor() -> str:
    """Return the processor's vendor, family and model: MKL chooses its kernels, and so their sums, by these."""
    facts = Path("/proc/cpuinfo")
    if not facts.is_file():
        return platform.processor()
    rows = (line.partition(":") for line in facts.read_text().partition("\n\n")[0].splitlines())
    values = {name.strip(): value.strip() for name, _, value in rows}
    return ", ".join(values.get(name, "") for name in ("vendor_id", "cpu family", "model"))


def is_comparable(recorded: dict[str, Any]) -> bool:
    """True if losses recorded under these facts must match this machine to the last digit."""
    return recorded == here()


def _train(folder: Path, names: list[str]) -> None:
    import numpy as np

    from caramba.artifacts import style
    from caramba.cli import main

    style._saved = leave_blank  # no figure is compared
    tokens = folder / "tokens.npy"
    np.save(tokens, np.frombuffer(TEXT.read_bytes(), dtype=np.uint8).astype(np.uint16))
    os.chdir(folder)
    found: dict[str, Any] = {}
    for name in names:
        words = [*RECIPES[name], *SHARED, f"data.path={tokens}", f"name=golden_{name}", "--quiet"]
        if status := main(["launch", *words]):
            raise SystemExit(status)
        (metrics,) = folder.glob(f"runs/golden_{name}/*/metrics.csv")
        with metrics.open(newline="") as file:
            found[name] = {
                f"{row['phase']}/{row['step']}": {column: float(row[column]) for column in COLUMNS}
                for row in csv.DictReader(file)
            }
    (folder / "measured.json").write_text(json.dumps(found))


if __name__ == "__main__":
    _train(Path(sys.argv[1]).resolve(), sys.argv[2:])
