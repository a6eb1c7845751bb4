"""Damage artifacts of a tiny run and its token folder, and check that each is refused by its file's name.

`python scripts/faults/bitflip.py --seed 1 --count 1000 --jobs 2` trains for a few steps, flips single random bits of
random artifacts that are read back, removes, truncates and swaps some, opens copies with shuffled times, and removes or
swaps the checkpoint that the run's record names. It prints a JSON result and exits 1 if damage is accepted or a copy
gives other weights.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from caramba.data.checkpoint import load_tensors, load_training_state, save_training_state
from caramba.data.checkpoint.locate import find_checkpoint
from caramba.data.folder import open_token_folder
from caramba.errors import CarambaError
from caramba.experiment.session import StageLedger
from caramba.runs.files import RECORD
from caramba.runs.stages import read_finished_stages

sys.path.insert(0, str(Path(__file__).parent))

from case_pool import TINY, Run, outcomes, parser, tally
from case_pool import main as report


def make(folder: Path) -> tuple[Path, Path]:
    """Train a tiny model in `folder`; return its run directory and its token folder."""
    variables = {**os.environ, "CARAMBA_HOME": str(folder / "home"), "CARAMBA_GIT_PATCH": "off"}
    words = [sys.executable, "-m", "caramba", "launch", *TINY, "train.steps=3"]
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
    StageLedger(run)
    open_token_folder(tokens)
    load_training_state(run / "checkpoints" / "pretrain.state.pt")
    return load_tensors(find_checkpoint(run, role="student"))


def is_refused(run: Path, tokens: Path, file: Path) -> str:
    """Return nothing where reading is refused with the file's name and status 2, else what happened."""
    try:
        read(run, tokens)
    except CarambaError as error:
        is_named = file.name in str(error) and error.exit_status == 2
        return "" if is_named else f"{file.name}: {str(error)[:200]}"
    return f"{file.name}: accepted"


def flip(run: Path, tokens: Path, chance: random.Random) -> str:
    """Flip a random bit of a random artifact, read, and restore the file; return what went wrong."""
    file = chance.choice(artifacts(run, tokens))
    intact = file.read_bytes()
    changed = bytearray(intact)
    changed[chance.randrange(len(intact))] ^= 1 << chance.randrange(8)
    file.write_bytes(changed)
    wrong = is_refused(run, tokens, file)
    file.write_bytes(intact)
    return wrong


def exchange(run: Path, tokens: Path, chance: random.Random) -> tuple[str, str]:
    """Remove, truncate or swap a random artifact, read, and restore it; return the kind and what went wrong."""
    files = artifacts(run, tokens)
    file = chance.choice(files)
    kinds = ["truncated", "swapped"]
    # Without its record of sums a run opens as one of an earlier version does.
    kinds += ["removed", "removed"] if file != run / RECORD else []
    kind, intact = chance.choice(kinds), file.read_bytes()
    if kind == "removed":
        file.unlink()
    elif kind == "truncated":
        file.write_bytes(intact[: chance.randrange(len(intact))])
    else:
        file.write_bytes(chance.choice([one for one in files if one.read_bytes() != intact]).read_bytes())
    wrong = is_refused(run, tokens, file)
    file.write_bytes(intact)
    return kind, wrong


def exchange_checkpoint(run: Path, folder: Path, chance: random.Random) -> tuple[str, str]:
    """Remove or swap the checkpoint that a run's record names, in a copy; return the kind and what went wrong."""
    copy = folder / "copy"
    shutil.copytree(run, copy)
    _shuffle_times(copy, chance)
    named = find_checkpoint(copy, role="student")
    kind = chance.choice(("checkpoint removed", "checkpoint swapped"))
    if kind == "checkpoint removed":
        named.unlink()
    else:  # other finite weights of the same shapes, with the labels of the named ones
        with safe_open(named, "pt") as file:
            labels = file.metadata()
        values = {name: value + chance.choice((1e-3, 1.0)) for name, value in load_tensors(named).items()}
        save_file(values, folder / "other.safetensors", metadata=labels)
        os.replace(folder / "other.safetensors", named)
    try:
        load_tensors(find_checkpoint(copy, role="student"))
        wrong = f"{kind}: accepted"
    except CarambaError as error:
        wrong = "" if named.name in str(error) and error.exit_status == 2 else f"{kind}: {str(error)[:200]}"
    shutil.rmtree(copy)
    return kind, wrong


def open_copy(run: Path, folder: Path, chance: random.Random) -> str:
    """Copy a run, shuffle the times of its files, and compare the weights that it opens; return what went wrong."""
    copy = folder / "copy"
    shutil.copytree(run, copy)
    _shuffle_times(copy, chance)
    found, expected = (load_tensors(find_checkpoint(place, role="student")) for place in (copy, run))
    shutil.rmtree(copy)
    if found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found):
        return ""
    return "copies: one gives other weights"


def _shuffle_times(folder: Path, chance: random.Random) -> None:
    for file in sorted(folder.rglob("*")):
        moment = chance.randrange(2**31)
        os.utime(file, (moment, moment))


def damage(
    seed: int, count: int, copies: int, folder: Path, jobs: int = 1, seconds: float | None = None
) -> dict[str, Any]:
    """Damage and restore artifacts of a run; return counts and what went wrong.

    Args:
        count: of bit flips; a tenth as many files are removed, truncated or swapped.
        copies: with shuffled times; as many named checkpoints are removed or swapped.
    """
    os.environ["CARAMBA_HOME"] = str(folder / "home")
    run, tokens = make(folder)
    read(run, tokens)

    def prepare(place: Path) -> Run:
        own_run, own_tokens = place / "run", place / "tokens"
        shutil.copytree(run, own_run)
        shutil.copytree(tokens, own_tokens)
        # A killed neighbour must not leave half a cache of sums.
        os.environ["CARAMBA_HOME"] = str(place / "home")

        def case(index: int) -> dict[str, Any]:
            chance = random.Random(f"{seed}:{index}")
            if index < count:
                kind, wrong = "flips", flip(own_run, own_tokens, chance)
            elif index < count + copies:
                kind, wrong = "copies", open_copy(own_run, place, chance)
            elif index < count + 2 * copies:
                kind, wrong = exchange_checkpoint(own_run, place, chance)
            else:
                kind, wrong = exchange(own_run, own_tokens, chance)
            return {"kind": kind, "fault": wrong}

        return case

    total = count + 2 * copies + count // 10
    done, wrong = tally(outcomes(prepare, 0, total, jobs, seconds=seconds))
    return {"seed": seed, **done, **wrong}


def main() -> int:
    described = parser(__doc__, count=1000, cases="bit flips")
    described.add_argument("--copies", type=int, default=100, help="copies with shuffled times (default 100)")
    words = described.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = (words.seed, words.count, words.copies, Path(folder), words.jobs, words.seconds)
        return report(words, lambda: damage(*options), "wrong")


if __name__ == "__main__":
    raise SystemExit(main())
