"""Run all checks of the Metal kernels in the emulator, and write docs/benchmarks/metal_emulated.json. Needs g++.

No figure is a speed: nothing here ran on Apple hardware.

Usage: python scripts/metal.py [--samples 500] [--parts bytes,mutants] [--ops rope] [--jobs 2] [--seed 0] [--json FILE]
Parts and ops that are not asked for stay as the file has them, so that a run resumes by parts. `--demo WORDS` gives the
words of the watched command line. An op and dtype, or a kernel, has a process of its own, of 2 GB at most.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "faults")]

from case_pool import outcomes  # noqa: E402 - scripts are no package

SANITIZED_SAMPLES, ORDERS = 10, 20
STUCK_S = 7200.0


def spread(jobs: int, items: Sequence[Any], work: Callable[[Any], Any]) -> Iterator[tuple[Any, Any]]:
    """Yield each item with its result of `work`, from a process of its own, in the order of their ends."""

    def prepare(_: Path) -> Callable[[int], dict[str, Any]]:
        import torch

        torch.set_num_threads(1)
        return lambda index: {"found": work(items[index])}

    for index, found in outcomes(prepare, 0, len(items), jobs, stuck_s=STUCK_S, batch=1):
        if "found" not in found:
            raise RuntimeError(f"{items[index]}: {found['fault']}")
        print(items[index], found["found"], flush=True)
        yield items[index], found["found"]


def random_shapes(
    samples: int, ops: Sequence[str], jobs: int, seed: int, options: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Compare random calls of ops in every dtype with float64."""
    from tests.ops.metal_cases import DTYPES, Errors, calls, errors_of, launcher
    from tests.ops.metal_emulator.library import emulated_metal

    def compare(item: tuple[str, str]) -> dict[str, Any]:
        op, name = item
        run, drawn = launcher(op), list(calls(op, name, samples, seed=seed))
        with emulated_metal(options=options) as emulator:
            for start in range(0, samples, 50):  # one run of the compiler for what these need
                some = drawn[start : start + 50]
                emulator.prepare(lambda some=some, run=run: [call.run(run) for call in some])
            errors, passed = Errors(), 0
            for emulator.seed, call in enumerate(drawn):
                own = errors_of(call, call.run(run))
                passed += own.are_small
                errors = errors.with_(own)
        row: dict[str, Any] = {"calls": samples, "passed": passed, "launches": len(emulator.launches)}
        row["largest_relative_error_of_fp32_results"] = errors.relative
        if errors.more_ulps > -1e9:
            row["ulps_more_than_the_reference"] = errors.more_ulps
        return row

    items = [(op, name) for op in ops for name in DTYPES]
    rows = dict(spread(jobs, items, compare))
    return {op: {name: rows[op, name] for name in DTYPES} for op in ops}


def mutants(jobs: int) -> dict[str, Any]:
    """Count mistakes that are put in, and those that no call shows."""
    from tests.ops.metal_cases import surviving
    from tests.ops.metal_emulator.library import emulated_metal
    from tests.ops.metal_mutants import MUTANTS

    def count(kernel: str) -> dict[str, Any]:
        with emulated_metal() as emulator:
            left = surviving(kernel, emulator)
        n_mutants = len(MUTANTS[kernel])
        return {"mutants": n_mutants, "caught": n_mutants - len(left), "left": left}

    rows = dict(spread(jobs, list(MUTANTS), count))
    return {kernel: rows[kernel] for kernel in MUTANTS}


def orders(jobs: int, seed: int) -> dict[str, Any]:
    """Count calls whose results have the same bits in all orders of threads."""
    import torch
    from tests.ops.metal_cases import DTYPES, OPS, calls, launcher
    from tests.ops.metal_emulator.library import emulated_metal

    def count(op: str) -> dict[str, int]:
        run, same = launcher(op), 0
        drawn = [call for name in DTYPES for call in calls(op, name, 5, seed=seed + 2)]
        with emulated_metal() as emulator:
            emulator.prepare(lambda: [call.run(run) for call in drawn])
            for call in drawn:
                results = []
                for emulator.seed in range(ORDERS):
                    results.append([x.nan_to_num() for x in call.run(run)])
                same += all(all(map(torch.equal, other, results[0])) for other in results)
        return {"calls": len(drawn), "orders": ORDERS, "bit_equal": same}

    rows = dict(spread(jobs, OPS, count))
    return {op: rows[op] for op in OPS}


def bytes_moved(jobs: int) -> dict[str, Any]:
    """Count bytes at the shapes of the 1B presets."""
    from tests.ops.metal_bytes import moved, one_billion
    from tests.ops.metal_emulator.library import emulated_metal

    def count(batch: int) -> dict[str, Any]:
        found = {}
        with emulated_metal() as emulator:
            for name, call in one_billion(batch=batch):
                if batch == 8 or name.startswith("dba_decode"):
                    bytes_, least = moved(call, emulator)
                    found[name] = {"bytes": bytes_, "least": least, "over": bytes_ / least - 1}
        return found

    rows = dict(spread(jobs, (8, 4), count))
    return {**rows[8], **rows[4]}


def sanitizer_findings(ops: str, jobs: int, seed: int) -> dict[str, Any]:
    """Run random calls under AddressSanitizer and UndefinedBehaviorSanitizer, in a process that loads them first."""
    library = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    variables = os.environ | {"LD_PRELOAD": library.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0"}
    words = [sys.executable, __file__, "--sanitized", "--ops", ops, "--jobs", str(jobs), "--seed", str(seed)]
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
    found = [line for line in done.stderr.splitlines() if "runtime error" in line or "ERROR: Add" in line]
    rows = len(done.stdout.splitlines())
    if done.returncode and not found:
        raise RuntimeError(done.stderr[-2000:])
    return {"ops_and_dtypes": rows, "calls_of_each": SANITIZED_SAMPLES, "findings": found}


def watch_demo(words: list[str]) -> dict[str, Any]:
    """Run `make demo` as if on MPS, and list what Apple's GPU would refuse: float64, pinned memory, calls of CUDA."""
    from tests.as_if_on_mps import as_if_on_mps

    from caramba.cli import main

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), as_if_on_mps() as watch:
        status = main(["launch", "device=mps", *words])
    found = [f"{count} x {' '.join(key)}" for key, count in sorted(watch.findings.items())]
    return {"words": words, "status": status, "operators": watch.operators.total(), "findings": found}


def main() -> None:
    from tests.ops.metal_cases import OPS

    from caramba.runs.files import write_atomic

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--ops", default=",".join(OPS), help="of random_shapes and sanitizers")
    parser.add_argument("--demo", default="", help="words of its command line")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the calls (default 0)")
    parser.add_argument("--json", type=Path, default=ROOT / "docs/benchmarks/metal_emulated.json")
    parser.add_argument("--parts", default="bytes,mutants,orders,sanitizers,random_shapes,demo")
    parser.add_argument("--sanitized", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.sanitized:
        from tests.ops.metal_emulator.library import SANITIZED

        random_shapes(SANITIZED_SAMPLES, given.ops.split(","), given.jobs, given.seed, SANITIZED)
        return
    work = {
        "bytes": lambda: bytes_moved(given.jobs),
        "mutants": lambda: mutants(given.jobs),
        "orders": lambda: orders(given.jobs, given.seed),
        "demo": lambda: watch_demo(given.demo.split()),
        "sanitizers": lambda: sanitizer_findings(given.ops, given.jobs, given.seed),
        "random_shapes": lambda: random_shapes(given.samples, given.ops.split(","), given.jobs, given.seed),
    }
    facts = {
        "benchmark": "metal_emulated",
        "made_by": "python scripts/metal.py",
        "hardware": "none: kernels are emulated on a CPU, not run on Apple hardware",
        "machine": {"platform": platform.platform(), "python": platform.python_version()},
    }
    for part in given.parts.split(","):
        found = work[part]()
        before = json.loads(given.json.read_text()) if given.json.exists() else {}  # of other processes too
        if part == "random_shapes":
            found = before.get(part, {}) | found
        write_atomic(given.json, json.dumps(before | facts | {part: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
