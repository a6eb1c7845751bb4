"""Random manifests: `caramba compile` must refuse one exactly where `caramba launch` does. Prints JSON results.

    python scripts/faults/compile_launch.py --seed 1 --count 300 --jobs 2 --json results.json

A launch that is accepted trains tiny models for one step, on the CPU of this process. Settings that only a device can
refuse are not varied.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from caramba.cli import main as caramba
from caramba.data import train_bpe, write_token_folder

sys.path.insert(0, str(Path(__file__).parent))

from case_pool import POOL, Found, main, outcomes

ENTRIES = 300
ALWAYS = ("device=cpu", "train.steps=1", "settings.instrument=none", "resume=never", "paper=none")
TEACHER = "model.teacher.manifest.embedder.vocab_size"
# Each list holds the alternatives of one setting, as words with spaces; most are accepted alone, so that refusals meet
# acceptances. The first one is taken unless the setting varies.
CHOICES: tuple[tuple[str, ...], ...] = (
    (
        *["model=tiny train=pretrain"] * 2,
        "model=tiny_dba train=upcycle",
        "model=tiny_dba train=upcycle ~train.phases.pretrain",
        "model=tiny_dba train=upcycle ~train.phases.drift ~train.phases.teacher_continued",
        "model=tiny_dba train=blockwise",
        "model=tiny_dba train=blockwise model.teacher.checkpoint=RUN",
        "model=tiny_dba train=upcycle model.teacher.checkpoint=RUN",
        "model=tiny train=finetune",
        "model=tiny train=finetune model.checkpoint=RUN",
        "model=tiny train=none model.checkpoint=RUN",
    ),
    (
        *["data=tokens data.path=corpus"] * 6,
        "data=tokens data.path=ids.npy",
        "data=tokens data.path=ids.tokens data.val_path=ids.npy",
        "data=tokens data.path=short.tokens",
        "data=tokens data.path=bad.tokens",
        "data=tokens data.path=nowhere",
        "data=tokens data.path=corpus data.packing=best_fit",
        "data=tokens data.path=corpus data.vocab_size=299",
        f"data=stdlib data.max_bytes=400000 data.vocab_size={ENTRIES}",
    ),
    (*[f"VOCABULARY={ENTRIES}"] * 8, "VOCABULARY=200", "VOCABULARY=512"),
    (*["train.block_size=16"] * 4, "train.block_size=64", "train.block_size=4000", "train.block_size=0"),
    (
        *["train.batch_size=2"] * 5,
        *("train.batch_size=auto", "train.batch_size=2 train.accumulate=2", "train.batch_size=0"),
    ),
    (*["plan=off"] * 6, "plan=nowhere.json"),
    (
        *[""] * 4,
        *("train.dtype=bfloat16", "train.dtype=float16", "train.use_amp=true train.amp_dtype=bfloat16"),
        *("train.tf32=true", "train.float8=rowwise", "train.activation_offload=true"),
        "train.optimizer_offload=true",
    ),
    (
        *[""] * 5,
        *("parallel=ddp launcher=process", "launcher.nproc_per_node=2", "parallel=fsdp2_tp parallel.tp=3"),
        *("launcher=slurm_sbatch_only", "launcher=process"),
    ),
    (*["verify=none"] * 3, "verify=smoke", "verify=eval"),
    (
        *["benchmark=none"] * 4,
        *("benchmark=smoke", "benchmark=smoke DATASET=nowhere", "benchmark=controls"),
    ),
    (
        *[""] * 5,
        *("train.schedule=sequential", "train.lora={rank:2,targets:[all_linear]}"),
        "train.steps=2 settings.save_every=1",
    ),
)


VARIED = 0.35  # the share of settings that vary


def prepare(folder: Path) -> Path:
    """Write the data into the current folder and train one tiny model; return its run directory."""
    texts = [f"the {i} quick brown foxes jump over {i * 7} lazy dogs\n" * 8 for i in range(120)]
    write_token_folder(
        folder / "corpus", {"train": texts[:100], "val": texts[100:]}, train_bpe(texts, ENTRIES), {}
    )
    ids = " ".join(str(i % ENTRIES) for i in range(20_000))
    (folder / "ids.tokens").write_text(ids)
    import numpy as np

    np.save(folder / "ids.npy", np.arange(3000, dtype=np.uint16) % ENTRIES)
    (folder / "short.tokens").write_text("1 2 3 4 5")
    (folder / "bad.tokens").write_text("1 2 x 4")
    words = (
        "model=tiny", "train=pretrain", "data=tokens", "data.path=corpus", "train.block_size=16", "train.batch_size=2",
        f"model.embedder.vocab_size={ENTRIES}", "benchmark=none", "plan=off", "name=teacher",
    )  # fmt: skip
    status, text = run(["launch", *ALWAYS, *words])
    if status:
        raise RuntimeError(f"the teacher did not train: {text}")
    return next((folder / "runs" / "teacher").iterdir())


def draw(rng: random.Random, teacher: Path) -> list[str]:
    """Return the words of one random manifest."""
    # Most settings keep their first alternative, which is accepted: a refusal of one would hide all others.
    chosen = (rng.choice(choices) if rng.random() < VARIED else choices[0] for choices in CHOICES)
    words = " ".join(chosen).split()
    made: list[str] = list(ALWAYS)
    for word in words:
        key, _, value = word.partition("=")
        if key == "VOCABULARY":
            made.append(f"model.embedder.vocab_size={value}")
            made += [f"{TEACHER}={value}"] if "model=tiny_dba" in words else []
        elif key == "DATASET":
            made.append(f"benchmark.benchmarks.0.config.dataset={value}")
        else:
            made.append(word.replace("=RUN", f"={teacher}"))
    return made


def run(words: Sequence[str]) -> tuple[int, str]:
    """Run the command line in this process; return its status and what it printed."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        status = caramba([*words])
    return status, shown.getvalue()


def compare(rng: random.Random, teacher: Path) -> Found:
    """Return the words of a random manifest, and what compile and launch made of it."""
    words = draw(rng, teacher)
    compiled, compile_text = run(["compile", *words])
    launched, launch_text = run(["launch", *words, "name=drawn"])
    shutil.rmtree("runs/drawn", ignore_errors=True)
    return {
        "words": words,
        "compile": compiled,
        "launch": launched,
        "agree": (compiled == 2) == (launched == 2),
        "error": (launch_text if launched == 2 else compile_text if compiled == 2 else "")[-400:],
    }


def compare_all(seed: int, count: int, place: Path, jobs: int, seconds: float) -> dict[str, Any]:
    """Compare `count` manifests; return counts and those in which compile and launch differ."""
    # In a process of its own: the others are forked from one that has used no thread of torch.
    first = multiprocessing.get_context("fork").Process(target=_prepare_alone, args=(place,))
    first.start()
    first.join()
    teacher = next((place / "runs" / "teacher").iterdir())

    def enter(folder: Path) -> Callable[[int], Found]:
        os.environ["CARAMBA_HOME"] = f"{place}/home"
        shutil.copytree(place, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("runs", "home"))
        return lambda index: compare(random.Random(f"{seed}:{index}"), teacher)

    rows = [found for _, found in outcomes(enter, count, jobs, seconds=seconds)]
    compared = [row for row in rows if "words" in row]
    refused = [row for row in compared if row["launch"] == 2]
    return {
        "seed": seed,
        "count": len(rows),
        "refused": len(refused),
        "failed": sum(row["launch"] not in (0, 2) for row in compared),
        "differ": [row for row in rows if not row.get("agree")],
        "refusals": collections.Counter(row["error"].strip().splitlines()[-1][:60] for row in refused),
    }


def _prepare_alone(place: Path) -> None:
    os.environ["CARAMBA_HOME"] = f"{place}/home"
    os.chdir(place)
    prepare(place)


def campaign(words: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        return compare_all(words.seed, words.count, Path(place), words.jobs, words.seconds)


if __name__ == "__main__":
    sys.exit(main(__doc__, campaign, (*POOL, ("--count", 300)), "differ", "failed"))
