"""How fast `caramba prepare text` tokenises on one core, and whether its memory grows with the text. Writes JSON.

Text is Python source of the installed packages, repeated as documents that differ, or what --text names. The command
runs on a smaller and on a larger amount, on one core. Speed is the difference of their text over the difference of
their CPU time, so that start-up and training the BPE do not count, nor what other processes take.

Usage: python scripts/bench/run.py prepare [--megabytes 250 1000] [--text FILE] [--train-bpe 8192] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from record import Record, machine_facts

SEPARATOR = "<|document|>"
ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
MEBI = 1 << 20


def sources(root: Path) -> Iterator[str]:
    """Yield the text of every UTF-8 Python file below `root`, in sorted order."""
    for file in sorted(root.rglob("*.py")):
        try:
            yield file.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue


def write_text(file: Path, size: int, given: Path | None) -> None:
    """Write `size` bytes of documents with a separator after each; repetitions differ in their first line."""
    written, turn = 0, 0
    with open(file, "w", encoding="utf-8", newline="") as out:
        while written < size:
            turn += 1
            texts = (
                [given.read_text(encoding="utf-8")]
                if given
                else sources(Path(sysconfig.get_paths()["purelib"]))
            )
            before = written
            for number, text in enumerate(texts):
                document = f"# document {turn}-{number}\n{text}"[: size - written] + SEPARATOR
                written += len(document.encode())
                out.write(document)
                if written >= size:
                    break
            if written == before:
                raise SystemExit("no text found; name some with --text")


def resident(pid: int) -> int:
    """Bytes that a process holds in memory now; 0 once it has ended or where /proc is missing."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure(size: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Prepare `size` bytes on one core; return its times, its tokens and its memory over time."""
    text, output = folder / "text.txt", folder / "tokens"
    write_text(text, size, options.text)
    words = ["prepare", "text", str(text), "--separator", SEPARATOR, "--output", str(output), "--quiet"]
    words += ["--train-bpe", str(options.train_bpe)]
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "caramba", *words], env={**os.environ, **ONE_THREAD})
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
    samples: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            samples.append(resident(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, status, used = os.wait4(process.pid, 0)
    ended.set()
    watcher.join()
    wall = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"caramba {' '.join(words)} ended with status {process.returncode}")
    splits = json.loads((output / "meta.json").read_text())["splits"].values()
    quarters = [samples[len(samples) * i // 4 : len(samples) * (i + 1) // 4] for i in range(4)]
    return {
        "text_mb": text.stat().st_size / 1e6,
        "documents": sum(facts["documents"] for facts in splits),
        "tokens": sum(facts["tokens"] for facts in splits),
        "wall_s": wall,
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_mib": used.ru_maxrss / (MEBI if sys.platform == "darwin" else 1024),
        "peak_mib_by_quarter": [max(part, default=0) / MEBI for part in quarters],
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=float, nargs=2, default=(250, 1000), metavar=("SMALL", "LARGE"))
    parser.add_argument(
        "--text", type=Path, help="a UTF-8 file to repeat, instead of the installed packages' source"
    )
    parser.add_argument("--train-bpe", type=int, default=8192)


def run(options: argparse.Namespace, record: Record) -> int | None:
    runs = []
    for size in sorted(options.megabytes):
        with tempfile.TemporaryDirectory() as name:
            runs.append(measure(round(size * 1e6), options, Path(name)))
        print(json.dumps(runs[-1]))
    small, large = runs
    seconds = large["cpu_s"] - small["cpu_s"]
    record.write_data(
        {
            **record.head(machine_facts()),
            "load_average": os.getloadavg()[0],
            "tokenizer": f"byte-level BPE of {options.train_bpe} entries, trained on the text",
            "text": options.text.name if options.text else "Python source of the installed packages",
            "mb_per_cpu_second": (large["text_mb"] - small["text_mb"]) / seconds,
            "must_mb_per_s": 5.0,
            "peak_ratio": large["peak_mib"] / small["peak_mib"],
            "runs": runs,
        },
    )
    print(f"{(large['text_mb'] - small['text_mb']) / seconds:.1f} MB a CPU second")
