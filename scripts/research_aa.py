"""Measure false wins of research loops by real launches: both arms of every pair differ in their seeds alone.

python scripts/research_aa.py --loops 100 --jobs 32 --out docs/benchmarks/research_aa.json

A loop is the product's: registered test, ledger, one baseline per seed for five candidates, each run a whole launch of
the preset `tiny` on the standard library, in this process. A candidate patches the learning rate to its own value, and
every run has a seed of its own. Figures are left blank. Each ledger is recomputed as by `caramba research verify`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from scipy.stats import beta

from caramba.config.manifest import Manifest
from caramba.config.paper import GateConfig
from caramba.config.parse import parse_as
from caramba.console import logger
from caramba.paper.research.experiment import Comparison
from caramba.paper.research.proposal import Proposal, arm_manifest
from caramba.paper.research.verify import verify_ledger
from caramba.runs import read_manifest
from caramba.runs.files import write_json, write_whole
from caramba.runs.manifest import canonical_json, manifest_sha256

GATE = GateConfig(metric="perplexity.student.nll", direction="less")
BENCHMARK = "{id:perplexity,config:{type:perplexity,block_size:32,batch_size:4,num_batches:8}}"
WORDS = (
    "model=tiny", "model.embedder.vocab_size=257", "data=stdlib_bytes", "data.max_bytes=100000", "device=cpu",
    "train=pretrain", "train.steps=12", "train.batch_size=4", "train.block_size=32", "verify=none", "benchmark=smoke",
    f"benchmark.benchmarks=[{BENCHMARK}]",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description="A/A loops of tiny real launches through the registered test."
    )
    parser.add_argument("--loops", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=1, help="processes among which the loops are spread")
    parser.add_argument("--out", type=Path, help="JSON file; default: print only")
    words = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="caramba-aa-") as name:
        record = measure(Path(name), words.loops, words.jobs)
    print(json.dumps(record, indent=1))
    print(f"{sum(os.times()[:4]):.0f} seconds of CPU, {time.perf_counter() - began:.0f} in all")
    if words.out is not None:
        write_json(words.out, record)


def measure(folder: Path, loops: int, jobs: int) -> dict[str, Any]:
    """Return how many loops accepted a candidate, with the 95% bound (Clopper-Pearson, one-sided)."""
    os.environ |= {"CARAMBA_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    base = _launched(folder, [*WORDS])
    one = functools.partial(run_loop, folder, base)
    if jobs == 1:
        found = [one(number) for number in range(loops)]
    else:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            found = list(pool.map(one, range(loops)))
    wins = sum(loop["has_won"] for loop in found)
    losses = [loss for loop in found for loss in loop["losses"]]
    return {
        "script": "scripts/research_aa.py", "loops": loops, "candidates": GATE.candidates, "runs": len(losses),
        "loops_with_a_win": wins, "upper_95": float(beta.ppf(0.95, wins + 1, loops - wins)) if wins < loops else 1.0,
        "verified_decisions": sum(loop["decisions"] for loop in found),
        "largest_token_difference": max(loop["token_difference"] for loop in found),
        "mean_loss": statistics.fmean(losses), "loss_std": statistics.stdev(losses),
    }  # fmt: skip


class AA(Comparison):
    """A comparison whose manifests are all the base's, which has run: they need no plan."""

    def _plan(self, name: str, manifest: Manifest) -> None:
        pass


def run_loop(folder: Path, base: Path, number: int) -> dict[str, Any]:
    """Run one loop to its first win or through its candidates, recompute its ledger, and return what it found."""
    logger.quiet = True
    place = folder / f"loop{number}"
    names = [f"candidate{index}" for index in range(1, GATE.candidates + 1)]
    manifest = read_manifest(base)
    phase = manifest.groups_to_run()[0].runs[0].train
    assert phase is not None

    def launch(command: Sequence[str], run: Path, timeout_s: float | None) -> int:
        """Launch the manifest of a run with a seed that no other run has."""
        arm = run.parent.name
        index = names.index(arm) + 1 if arm in names else 0
        seed = (number * (len(names) + 1) + index) * 1000 + int(run.name.removeprefix("seed"))
        file = run / "launched.json"
        write_whole(file, canonical_json(arm_manifest(read_manifest(run / "manifest.json"), seed)))
        _launched(run, [f"manifest={file}"])
        return 0

    comparison = AA(place, base, GATE, launch=launch)
    has_won = False
    for name in names:
        plain = {
            "name": name, "base_sha256": manifest_sha256(manifest), "rationale": "A/A.", "hypothesis": "No effect.",
            "smallest_effect": 0.01, "patches": [{"key": "lr", "value": phase.lr}],
        }  # fmt: skip
        has_won = comparison.run(parse_as(Proposal, plain)).state == "accepted"
        if has_won:
            break
    counts = verify_ledger(place)
    runs = comparison.ledger.of("run")
    tokens = [line["tokens"] for line in runs]
    shutil.rmtree(place)
    return {
        "has_won": has_won, "decisions": counts["decisions"], "token_difference": max(tokens) - min(tokens),
        "losses": [line["metric"] for line in runs],
    }  # fmt: skip


def _launched(folder: Path, words: list[str]) -> Path:
    """Launch in this process, with the folder as the working one, and return the run."""
    import torch

    import caramba.artifacts.style as style
    from caramba.launch.call import launch

    torch.set_num_threads(1)
    style._saved = lambda figure, form, metadata: b""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        return launch(words, quiet=True).path.absolute()


if __name__ == "__main__":
    main()
