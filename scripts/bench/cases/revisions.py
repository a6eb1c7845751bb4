"""Start, training and cached decoding of two commits, in turns on one machine. Writes JSON.

Usage: python scripts/bench/run.py revisions --base COMMIT [--head HEAD] [--rounds 5] [--steps 120] [--new 512]

Each commit is unpacked into a folder of its own. A round times both, in alternating order: `caramba compile` and
`--cfg job` until their end, steps of `model=tiny train=pretrain` between two rows of events.jsonl, and greedy tokens
of `model=tiny` with random weights in one thread. A ratio above 1 means that `head` is slower. Ratios are those of
one round, of the wall's seconds and of CPU seconds, which other work stretches less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from record import Record, machine_facts
from registry import UsageError, check_names

OPTIONS = """--base= --head=HEAD --rounds=5 --steps=120 --new=512 --only=compile,cfg,train,decode"""
SMOKE_OPTIONS = """--base HEAD --rounds 1 --only compile"""
TINY = ["model=tiny", "train=pretrain", "verify=none", "benchmark=none"]
CORPUS = ["data.max_bytes=200000", "data.vocab_size=400", "model.embedder.vocab_size=400"]
COMMANDS = {
    "compile": ["compile", "model=llama32_dba", "train=blockwise", "--print-plan"],
    "cfg": ["launch", *TINY, "--cfg", "job"],
}
DECODE = """
import sys, time, torch
from caramba import kernels
from caramba.config.model import ModelSpec
from caramba.infer import Generator
from caramba.launch.compose import compose
from caramba.model import build_model
torch.set_num_threads(1)
kernels.load(torch.device("cpu"))
tree = compose(["model=tiny", "train=none", "benchmark=none", "verify=none"]).tree["model"]
spec = ModelSpec.model_validate({key: tree[key] for key in ("embedder", "topology", "head")})
model = build_model(spec, seed=0, device=torch.device("cpu")).eval()
generator = Generator(model, None, compiled=False, max_new_tokens=int(sys.argv[1]), temperature=0.0)
generator.generate([[1]])
times = []
for _ in range(3):
    began, cpu = time.perf_counter(), time.process_time()
    generator.generate([[1]])
    times.append((time.perf_counter() - began, time.process_time() - cpu))
print(*min(times))
"""
Seconds = tuple[float, float]
"""Of the wall and of the CPU."""


def unpack(commit: str, folder: Path) -> Path:
    """Write the code of a commit to a folder, as an editable install sees it."""
    archive = subprocess.run(
        ["git", "archive", commit, "src", "conf", "kernels", "pyproject.toml"],
        check=True,
        capture_output=True,
    )
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    packages = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    for name, place in packages.items():
        link = folder / "src" / name.replace(".", "/")
        if not link.exists():
            link.symlink_to(folder / place)
    return folder


def run_in(tree: Path, words: list[str]) -> tuple[Seconds, str]:
    """Run Python over the code of a tree, in its folder `work`; return what it took and printed."""
    work = tree / "work"
    work.mkdir(exist_ok=True)
    # Nothing in the tree was installed, so that its code has to come first on the path.
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "CARAMBA_HOME": str(tree / "home")}
    before, began = os.times(), time.perf_counter()
    ended = subprocess.run(
        [sys.executable, *words], cwd=work, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    wall, after = time.perf_counter() - began, os.times()
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return (wall, cpu), ended.stdout


def measure(tree: Path, words: argparse.Namespace) -> dict[str, Seconds]:
    """Return the seconds of each kind of work for one tree."""
    found: dict[str, Seconds] = {}
    for name, command in COMMANDS.items():
        if name in words.only:
            found[name] = run_in(tree, ["-m", "caramba", *command])[0]
    if "train" in words.only:
        launch = ["-m", "caramba", "launch", *TINY, *CORPUS, "plan=off", "resume=never"]
        (_, cpu), _ = run_in(tree, [*launch, f"train.steps={words.steps}"])
        run = max((tree / "work" / "runs").glob("*/*"), key=lambda place: place.name)
        rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        times = [row["time"] for row in rows if row["event"] == "metrics"]
        if len(times) < 2:
            raise UsageError(f"--steps {words.steps}: {len(times)} rows in events.jsonl, expected at least 2")
        found["train"] = (times[-1] - times[0], cpu)
    if "decode" in words.only:
        wall, cpu = run_in(tree, ["-c", DECODE, str(words.new)])[1].split()
        found["decode"] = (float(wall), float(cpu))
    return found


def run(words: argparse.Namespace, record: Record) -> None:
    """Measure, print the ratios, and write them after each round."""
    check_names("--only", words.only, (*COMMANDS, "train", "decode"))
    if not words.base:
        raise UsageError("--base: got none, expected the commit to compare with, such as --base HEAD~20")
    record.start(machine_facts())
    with tempfile.TemporaryDirectory() as place:
        trees = {side: unpack(getattr(words, side), Path(place) / side) for side in ("base", "head")}
        if words.rounds > 1:
            for tree in trees.values():  # builds the token caches and compiles Python
                measure(tree, argparse.Namespace(**{**vars(words), "steps": 20, "new": 8}))
        rounds: list[dict[str, dict[str, Seconds]]] = []
        for number in range(words.rounds):
            order = ("base", "head") if number % 2 == 0 else ("head", "base")
            rounds.append({side: measure(trees[side], words) for side in order})
            ratios = {
                kind: {
                    clock: [each["head"][kind][at] / each["base"][kind][at] for each in rounds]
                    for at, clock in enumerate(("wall", "cpu"))
                }
                for kind in rounds[0]["head"]
            }
            medians = {
                kind: {clock: statistics.median(all_of) for clock, all_of in clocks.items()}
                for kind, clocks in ratios.items()
            }
            record.save(median_ratio=medians, ratios=ratios, rounds=rounds)
    for kind, clocks in medians.items():
        print(
            kind,
            *(
                f"{clock} {ratio:.3f} ({min(ratios[kind][clock]):.3f} to {max(ratios[kind][clock]):.3f})"
                for clock, ratio in clocks.items()
            ),
        )
