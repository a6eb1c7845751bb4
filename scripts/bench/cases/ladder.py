"""The training ladder of `benchmark=ladder` on a 1B model, in as many calls as it takes. Writes JSON and a plot.

A call that is over its time stops the run, and the next one resumes it: rows that are on record are kept, the one
in progress is measured again. At another commit, on another device, with another torch or other words a run of its own
begins; with --again, too. The JSON and the plot hold the rows so far. The top, which the musts are about, is the
ladder's own: the fastest row that keeps all activations and row 0's held-out loss, of which the musts take the mean
over the runs of the top, with their noise.

Usage on a GPU: python scripts/bench/run.py ladder [--seconds 580] [--size 1b_quarter] [--batch 8]
    [--work runs/bench_ladder] [--out docs/benchmarks/ladder.json] [-- OVERRIDES]
`--size 1b_quarter` is the widths and the vocabulary of 1B in 4 layers, which two calls finish; `1b` all 16, in many.
`--smoke --out FILE` runs its means once in a minute, `--size tiny --out FILE` shows on a CPU that it works.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cases.training import head_commit
from record import Record

from caramba.artifacts.training_ladder import draw_training_ladder
from caramba.config.ladder import RUNGS, top_of
from caramba.experiment.ledger import StageLedger
from caramba.result import BenchmarkResult, RunResult
from caramba.runtime import choose_device, device_facts

CONFIG = "benchmark.benchmarks.0.config"
ROWS = f"[{','.join(RUNGS)}]"  # bf16_weights too, which has to be asked for
COMMON = ["train=none", "verify=none", "benchmark=ladder", "resume=never", "logger.tensorboard=false"]
FILES = ("train-00000.npy", "val-00000.npy")
# The standard library in 2048 tokens; a model of 128256 reads these as well, and its head is no smaller for it.
TOKENS = ["data=tokens", f"data.path={{tokens}}/{FILES[0]}", f"data.val_path={{tokens}}/{FILES[1]}"]
VALUES = {  # of the ladder's own keys, where a size does not say otherwise
    "val_windows": 32,  # the same ones for every row: 65,536 tokens
    "most_batch": 128,
}
SIZES: dict[str, tuple[list[str], dict[str, int | str]]] = {
    # The whole model: many calls. A row is 16384 tokens a step, row 0 alone takes ten minutes.
    "1b": (["model=llama32_1b", *TOKENS], {"largest_seconds": 240, "most_batch": 64}),
    # Its widths and vocabulary, a quarter of its depth: 525 s of --batch 4, so two calls of --batch 8.
    "1b_quarter": (
        ["model=llama32_1b", "model.topology.layers.0.repeat=4", *TOKENS],
        {"largest_seconds": 70},
    ),
    # Rows that compile, cast and checkpoint once: whether it runs on this machine, in a minute.
    "smoke": (
        ["model=llama32_1b", "model.topology.layers.0.repeat=1", *TOKENS],
        {
            "rows": "[baseline,bf16,flash,compile,bf16_weights,fp8,full,largest_batch]",
            "leave_one_out": "false",
            **{"block_size": 512, "warmup_steps": 3, "timed_steps": 4, "loss_steps": 8},
            **{"largest_seconds": 12, "most_batch": 8, "val_windows": 2, "twins": 1},
        },
    ),
    "tiny": (
        [
            *("model=tiny", "model.topology.layers.0.repeat=1", "data.max_bytes=400000"),
            *("data.vocab_size=512", "model.embedder.vocab_size=512"),
        ],
        {
            **{"block_size": 32, "warmup_steps": 1, "timed_steps": 2, "loss_steps": 3},
            **{"most_batch": 1, "val_windows": 2, "twins": 1},
        },
    ),
}
SPEED, MEMORY, LOSS = 8.0, 1 / 3, 0.01


def words_of(size: str, batch: int, tokens: Path, overrides: list[str]) -> list[str]:
    """Return the words of the ladder's command line."""
    words, values = SIZES[size]
    words = [word.format(tokens=tokens) for word in words]
    values = {"rows": ROWS, **VALUES, **values, "batch_size": batch}
    return [*words, *COMMON, *(f"++{CONFIG}.{key}={value}" for key, value in values.items()), *overrides]


def prepare_data(work: Path) -> Path:
    """Return the folder of the tokens, which is made by the first call."""
    folder = work / "tokens"
    if not all((folder / name).is_file() for name in FILES):
        command = [sys.executable, "-m", "caramba", "prepare", "stdlib", "--train-bpe", "2048"]
        work.mkdir(parents=True, exist_ok=True)
        subprocess.run([*command, "--output", str(folder)], check=True, stdout=subprocess.DEVNULL, cwd=work)
    return folder


def wait_for_end(child: subprocess.Popen[bytes], seconds: float = 6.0) -> int:
    """Ask a run to stop, and end it where it does not within `seconds`, as while it compiles: what is on record stays.

    Returns its exit status.
    """
    child.send_signal(signal.SIGTERM)
    try:
        return child.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def folder_of(work: Path, words: list[str], machine: dict[str, Any], commit: str) -> Path:
    """Return the only run that may be resumed: of these words, device, torch and commit."""
    facts = [words, machine["name"], machine["torch"], commit]
    return work / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def climb(words: list[str], work: Path, cache: Path, seconds: float) -> tuple[Path | None, int]:
    """Run or resume the ladder of a folder for `seconds`; return its run directory and exit status."""
    folders = sorted(work.glob("runs/*/*"))
    command = ["resume", str(folders[-1])] if folders else ["launch", *words]
    if folders and (folders[-1] / "result.json").is_file():
        return folders[-1], 0
    environment = {**os.environ, "CARAMBA_HOME": str(cache)}
    child = subprocess.Popen([sys.executable, "-m", "caramba", *command], cwd=work, env=environment)
    try:
        status = child.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        status = wait_for_end(child)
    folders = sorted(work.glob("runs/*/*"))
    return (folders[-1] if folders else None), status


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Return the rows that a run has on record, each with its seconds, and what failed."""
    found: list[dict[str, Any]] = []
    for folder in (run, *sorted(run.glob("groups/*"))):
        for record in StageLedger(folder).records():
            for bench in record.benchmarks:
                found += [{**row, "seconds": bench.seconds} for row in bench.rows]
                if bench.error is not None:
                    found.append(
                        {
                            "row": bench.id,
                            "what": bench.id,
                            "skipped": bench.error[:300],
                            "seconds": bench.seconds,
                        }
                    )
    return found


def musts_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the ladder's top is compared with, its change of held-out loss and the noise of its own runs."""
    top = top_of(rows, LOSS)
    if top is None or top["row"] == "baseline":
        return []
    twins = [row for row in rows if row.get("of_row") == top["row"] and row.get("loss_noise") is not None]
    runs = [*(row for row in rows if row["row"] == top["row"]), *twins]
    delta = abs(statistics.mean(row["val_loss_delta"] for row in runs))
    noise = twins[-1] if twins else None
    beside = "" if noise is None else f" (mean of {len(runs)} runs, noise {noise['loss_noise']:.4f} of a run)"
    held = (
        ("speed over row 0", top["speed_up"], SPEED, top["speed_up"] >= SPEED),
        ("memory of row 0's", top["memory_ratio"], MEMORY, top["memory_ratio"] <= MEMORY),
        (f"change of held-out loss{beside}", delta, LOSS, delta < LOSS),
    )
    return [
        {"row": top["row"], "what": what, "got": got, "limit": limit, "is_met": is_met}
        for what, got, limit, is_met in held
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=tuple(SIZES), default="1b")
    parser.add_argument("--smoke", action="store_true", help="the size that takes a minute")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step in every row")
    parser.add_argument(
        "--seconds", type=float, default=580.0, help="after which the run is stopped, to resume later"
    )
    parser.add_argument("--again", action="store_true", help="forget the run that was begun")
    parser.add_argument("--work", type=Path, default=Path("runs/bench_ladder"))
    parser.add_argument("overrides", nargs="*")


def run(given: argparse.Namespace, record: Record) -> int | None:
    began, work = time.monotonic(), given.work.absolute()
    if given.again:
        shutil.rmtree(work, ignore_errors=True)
    size = "smoke" if given.smoke else given.size
    tokens = work / "tokens" if size == "tiny" else prepare_data(work)
    words = words_of(size, given.batch, tokens, given.overrides)
    machine, commit = device_facts(choose_device("auto")), head_commit()
    folder = folder_of(work, words, machine, commit)
    folder.mkdir(parents=True, exist_ok=True)
    left = max(10.0, given.seconds - (time.monotonic() - began))
    run, status = climb(words, folder, work / "cache", left)
    rows = [] if run is None else rows_of(run)
    is_whole = run is not None and (run / "result.json").is_file()
    if not rows:
        print(f"no row was finished in {time.monotonic() - began:.0f} s; exit status {status}")
        return 1
    result = RunResult(
        "ladder",
        "bench",
        "",
        None,
        {},
        {},
        benchmarks=(BenchmarkResult("ladder", "ladder", rows=tuple(rows)),),
    )
    image, _ = draw_training_ladder(result)
    if image is not None:
        record.write_plot(image)
    record.write_data(
        {
            **record.head(machine),
            "plot": None if image is None else given.out.with_suffix(".png").name,
            "commit": commit,
            "command": " ".join(["caramba launch", *words]),
            "is_whole": is_whole,
            "musts": musts_of(rows),
            "rows": rows,
        },
    )
    for row in rows:
        print(f"{row['what']}: {row['skipped'] or _figures(row)}")
    for must in musts_of(rows):
        verdict = "met" if must["is_met"] else "MISSED"
        print(f"{must['row']}: {must['what']} {must['got']:.4g} (must {must['limit']:.4g}): {verdict}")
    print(
        f"whole, exit status {status}" if is_whole else f"exit status {status}; call this again to resume it"
    )
    return 0


def _figures(row: dict[str, Any]) -> str:
    words = [f"{row['tok_s']:,.0f} tokens/s ({row['speed_up']:.2f}x), {row['peak_bytes'] / 2**30:.2f} GiB"]
    if row.get("val_loss_delta") is not None:
        words.append(f"{row['val_loss_delta']:+.4f} nats")
    if row.get("loss_noise") is not None:
        words.append(f"noise {row['loss_noise']:.4f} of {row['loss_runs']} runs")
    if row.get("largest_batch") is not None:
        words.append(
            f"{row['largest_tok_s']:,.0f} at batch {row['largest_batch']}, ended by {row['largest_ended']}"
        )
    return ", ".join(words)
