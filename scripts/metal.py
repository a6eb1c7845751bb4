"""Run all checks of the Metal kernels in the emulator, and write docs/benchmarks/metal_emulated.json. Needs g++.

No figure is a speed: nothing here ran on Apple hardware.

Usage: python scripts/metal.py [--samples 500] [--parts bytes,mutants] [--ops rope] [--demo WORDS] [--out FILE]
Parts and ops that are not asked for stay as the file has them, so that a run resumes by parts.
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SANITIZED_SAMPLES, ORDERS = 10, 20


def random_shapes(samples: int, ops: list[str], options: tuple[str, ...] = ()) -> dict[str, Any]:
    """Compare random calls of ops in every dtype with float64."""
    from tests.ops.metal_cases import DTYPES, Errors, calls, errors_of, launcher
    from tests.ops.metal_emulator.library import emulated_metal

    found: dict[str, Any] = {}
    for op in ops:
        run = launcher(op)
        for name in DTYPES:
            drawn = list(calls(op, name, samples, seed=0))
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
            found.setdefault(op, {})[name] = row
            print(op, name, row, flush=True)
    return found


def mutants() -> dict[str, Any]:
    """Count mistakes that are put in, and those that no call shows."""
    from tests.ops.metal_cases import surviving
    from tests.ops.metal_emulator.library import emulated_metal
    from tests.ops.metal_mutants import MUTANTS

    found = {}
    for kernel, mistakes in MUTANTS.items():
        with emulated_metal() as emulator:
            left = surviving(kernel, emulator)
        found[kernel] = {"mutants": len(mistakes), "caught": len(mistakes) - len(left), "left": left}
        print(kernel, found[kernel], flush=True)
    return found


def orders() -> dict[str, Any]:
    """Count calls whose results have the same bits in all orders of threads."""
    import torch
    from tests.ops.metal_cases import DTYPES, OPS, calls, launcher
    from tests.ops.metal_emulator.library import emulated_metal

    found = {}
    for op in OPS:
        run, same, count = launcher(op), 0, 0
        for name in DTYPES:
            with emulated_metal() as emulator:
                for call in calls(op, name, 5, seed=2):
                    results = []
                    for emulator.seed in range(ORDERS):
                        results.append([x.nan_to_num() for x in call.run(run)])
                    count += 1
                    same += all(all(map(torch.equal, other, results[0])) for other in results)
        found[op] = {"calls": count, "orders": ORDERS, "bit_equal": same}
    print(found, flush=True)
    return found


def bytes_moved() -> dict[str, Any]:
    """Count bytes at the shapes of the 1B presets."""
    from tests.ops.metal_bytes import moved, one_billion
    from tests.ops.metal_emulator.library import emulated_metal

    found = {}
    with emulated_metal() as emulator:
        for batch in (8, 4):
            for name, call in one_billion(batch=batch):
                if name in found:
                    continue
                bytes_, least = moved(call, emulator)
                found[name] = {"bytes": bytes_, "least": least, "over": bytes_ / least - 1}
                print(name, found[name], flush=True)
    return found


def sanitizer_findings() -> dict[str, Any]:
    """Run random calls under AddressSanitizer and UndefinedBehaviorSanitizer, in a process that loads them first."""
    library = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    variables = os.environ | {"LD_PRELOAD": library.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        [sys.executable, __file__, "--sanitized"], env=variables, capture_output=True, text=True, check=False
    )
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
    sys.path.insert(0, str(ROOT))
    from tests.ops.metal_cases import OPS

    from caramba.runs.files import write_atomic

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--ops", default=",".join(OPS), help="of random_shapes")
    parser.add_argument("--demo", default="", help="words of its command line")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/benchmarks/metal_emulated.json")
    parser.add_argument("--parts", default="bytes,mutants,orders,sanitizers,random_shapes,demo")
    parser.add_argument("--sanitized", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.sanitized:
        from tests.ops.metal_emulator.library import SANITIZED

        random_shapes(SANITIZED_SAMPLES, list(OPS), SANITIZED)
        return
    work = {
        "bytes": bytes_moved,
        "mutants": mutants,
        "orders": orders,
        "demo": lambda: watch_demo(given.demo.split()),
        "sanitizers": sanitizer_findings,
        "random_shapes": lambda: random_shapes(given.samples, given.ops.split(",")),
    }
    facts = {
        "benchmark": "metal_emulated",
        "made_by": "python scripts/metal.py",
        "hardware": "none: kernels are emulated on a CPU, not run on Apple hardware",
        "machine": {"platform": platform.platform(), "python": platform.python_version()},
    }
    for part in given.parts.split(","):
        found = work[part]()
        before = json.loads(given.out.read_text()) if given.out.exists() else {}  # of other processes too
        if part == "random_shapes":
            found = before.get(part, {}) | found
        write_atomic(given.out, json.dumps(before | facts | {part: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
