"""Damage artifacts of a tiny run and its token folder, and check that each is refused by its file's name.

`python scripts/faults/bitflip.py --seed 1 --flips 1000` trains for a few steps, flips single random bits of
random artifacts that are read back, removes, truncates and swaps each, and opens copies with shuffled times. It prints
a JSON result and exits 1 if damage is accepted or a copy gives other weights.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from caramba.data.checkpoint import load_tensors, load_training_state, save_training_state
from caramba.data.folder import open_token_folder
from caramba.errors import CarambaError
from caramba.experiment.ledger import Ledger
from caramba.model import find_checkpoint
from caramba.runs.checksums import RECORD
from caramba.runs.stages import read_finished_stages

TRAIN = (
    *(
        "model=tiny",
        "train=pretrain",
        "benchmark=none",
        "verify=none",
        "device=cpu",
        "settings.instrument=none",
    ),
    *("data.max_bytes=200000", "data.vocab_size=400", "model.embedder.vocab_size=400", "train.compile=false"),
    *("train.batch_size=2", "train.block_size=32", "train.steps=3"),
)


def make(folder: Path) -> tuple[Path, Path]:
    """Train a tiny model in `folder`; return its run directory and its token folder."""
    variables = {**os.environ, "CARAMBA_HOME": str(folder / "home"), "CARAMBA_GIT_PATCH": "off"}
    words = [sys.executable, "-m", "caramba", "launch", *TRAIN]
    subprocess.run(words, cwd=folder, env=variables, check=True, capture_output=True, timeout=600)
    run, tokens = next(folder.glob("runs/*/*/manifest.json")).parent, next(folder.glob("home/data/stdlib-*"))
    # A run that has finished keeps no training state.
    state = {"model": load_tensors(find_checkpoint(run, role="student")), "step": 3}
    save_training_state(run / "checkpoints" / "pretrain.state.pt", state)
    return run, tokens


def artifacts(run: Path, tokens: Path) -> list[Path]:
    """Return the files that are read back, in a fixed order."""
    return sorted([*run.glob("checkpoints/*"), *run.glob("stages/*"), run / RECORD, *tokens.iterdir()])


def read(run: Path, tokens: Path) -> dict[str, torch.Tensor]:
    """Read everything back as a resume does and return the weights."""
    read_finished_stages(run)
    Ledger(run)
    open_token_folder(tokens)
    load_training_state(run / "checkpoints" / "pretrain.state.pt")
    return load_tensors(find_checkpoint(run, role="student"))


def is_refused(run: Path, tokens: Path, file: Path) -> str:
    """Return nothing where reading is refused with the file's name and status 2, else what happened."""
    try:
        read(run, tokens)
    except CarambaError as error:
        # A stage whose record was removed is one that never finished: the run is named then.
        name = file.name if file.exists() or file.parent.name != "stages" else run.name
        return "" if name in str(error) and error.exit_status == 2 else f"{file.name}: {str(error)[:200]}"
    return f"{file.name}: accepted"


def damage(seed: int, flips: int, copies: int, folder: Path) -> dict[str, Any]:
    """Damage and restore artifacts; return counts and what was accepted."""
    rng = random.Random(seed)
    os.environ["CARAMBA_HOME"] = str(folder / "home")
    run, tokens = make(folder)
    expected = read(run, tokens)
    files = artifacts(run, tokens)
    wrong: list[str] = []
    done = {"flips": 0, "removed": 0, "truncated": 0, "swapped": 0, "copies": 0}

    def attempt(kind: str, file: Path) -> None:
        done[kind] += 1
        if reason := is_refused(run, tokens, file):
            wrong.append(f"{kind}: {reason}")

    for _ in range(flips):
        file = rng.choice(files)
        with open(file, "rb+") as stream:
            place = rng.randrange(file.stat().st_size)
            stream.seek(place)
            (byte,) = stream.read(1)
            stream.seek(place)
            stream.write(bytes([byte ^ 1 << rng.randrange(8)]))
            stream.flush()
            attempt("flips", file)
            stream.seek(place)
            stream.write(bytes([byte]))
    for file in files:
        intact = file.read_bytes()
        # Without its record of sums a run opens as one of an earlier version does.
        if file != run / RECORD:
            file.unlink()
            if not (file.parent.name == "stages" and file.name.endswith("-final.json")):
                attempt("removed", file)
        file.write_bytes(intact[: rng.randrange(len(intact))])
        attempt("truncated", file)
        other = rng.choice([one for one in files if one != file])
        file.write_bytes(other.read_bytes())
        attempt("swapped", file)
        file.write_bytes(intact)
    for index in range(copies):
        copy = folder / f"copy-{index}"
        shutil.copytree(run, copy)
        for file in copy.rglob("*"):
            moment = rng.randrange(2**31)
            os.utime(file, (moment, moment))
        found = load_tensors(find_checkpoint(copy, role="student"))
        done["copies"] += 1
        if found.keys() != expected.keys() or not all(
            torch.equal(found[key], expected[key]) for key in found
        ):
            wrong.append(f"copies: {index} gives other weights")
        shutil.rmtree(copy)
    read(run, tokens)
    return {"seed": seed, **done, "wrong": len(wrong), "examples": wrong[:20]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--copies", type=int, default=100, help="copies with shuffled times")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = damage(given.seed, given.flips, given.copies, Path(folder))
    print(json.dumps(result, indent=2))
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
