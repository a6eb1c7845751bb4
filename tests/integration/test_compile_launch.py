"""Random manifests: compile refuses one exactly where launch does. A launch that is accepted trains for one step.

Settings that only a device can refuse are not varied.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np

from caramba.data import train_bpe, write_token_folder
from tests import examples
from tests.integration.commands import caramba

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
VARIED = 0.35
"""The share of settings that vary."""


def prepare(folder: Path, cache: Path) -> Path:
    """Write the data and train one tiny model; return its run directory."""
    texts = [f"the {i} quick brown foxes jump over {i * 7} lazy dogs\n" * 8 for i in range(120)]
    splits = {"train": texts[:100], "val": texts[100:]}
    write_token_folder(folder / "corpus", splits, train_bpe(texts, ENTRIES), {})
    (folder / "ids.tokens").write_text(" ".join(str(i % ENTRIES) for i in range(20_000)))
    np.save(folder / "ids.npy", np.arange(3000, dtype=np.uint16) % ENTRIES)
    (folder / "short.tokens").write_text("1 2 3 4 5")
    (folder / "bad.tokens").write_text("1 2 x 4")
    words = (
        *("model=tiny", "train=pretrain", "data=tokens", "data.path=corpus", "train.block_size=16"),
        *("train.batch_size=2", f"model.embedder.vocab_size={ENTRIES}", "benchmark=none", "plan=off"),
    )
    done = caramba(["launch", *ALWAYS, *words, "name=teacher"], folder, cache)
    assert done.returncode == 0, done.stderr
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


def test_compile_refuses_random_manifests_iff_launch_does(tmp_path: Path, cache: Path) -> None:
    teacher = prepare(tmp_path, cache)
    refused, count = 0, 60 if examples.is_thorough else 6
    for index in range(count):
        words = draw(random.Random(f"3:{index}"), teacher)
        compiled = caramba(["compile", *words], tmp_path, cache)
        launched = caramba(["launch", *words, "name=drawn"], tmp_path, cache)
        shutil.rmtree(tmp_path / "runs" / "drawn", ignore_errors=True)
        text = f"case {index}: {' '.join(words)}\n{compiled.stderr}\n{launched.stderr}"
        assert launched.returncode in (0, 2), text
        assert (compiled.returncode == 2) == (launched.returncode == 2), text
        refused += launched.returncode == 2
    assert 0 < refused < count, "both kinds were seen"
