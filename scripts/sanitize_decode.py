"""Run the decode attention kernel under NVIDIA's compute-sanitizer: memcheck, then racecheck. Needs a CUDA device.

The kernels are compiled first, on all cores, into Triton's cache; the tools then see nothing but launches, every tensor
in an allocation of its own. The tool is part of the CUDA toolkit and of no Python package that caramba needs: where it
is missing this prints an error and ends with status 3.

Usage: python scripts/sanitize_decode.py [--seconds 60] [--tool memcheck,racecheck]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PLACES = ("/usr/local/cuda/bin", "/opt/cuda/bin", "/usr/local/cuda/compute-sanitizer")
MISSING, FOUND_ERRORS = 3, 9
LATENT = {"heads": (32, 1), "dims": (128, 64, 128)}
MIXED: dict[str, Any] = {"kinds": ("q4_0", "q8_0"), "lengths": (330, 270), "packed": 256, **LATENT}
HEADS: dict[str, Any] = {
    "kinds": ("q4_0", "q8_0", "q4_0"),
    "lengths": (330, 300),
    "heads": (32, 8),
    "packed": 256,
}
HEADS |= {"queries": 1, "window": 100, "null": True}
TILES = {"block_rows": 32, "block_tokens": 64, "n_splits": 3}
TEAM = {"block_rows": 32, "block_tokens": 32, "n_splits": 3, "n_warps": 4, "n_heads": 1, "n_stages": 1}
TEAM |= {"in_cuda": 1, "variant": 1}
PER_HEAD = {"block_rows": 8, "block_tokens": 32, "n_splits": 3, "n_heads": 2, "n_stages": 2, "in_cuda": 1}
CASES: dict[str, tuple[dict[str, Any], dict[str, int] | None]] = {
    "heads in CUDA": (HEADS, PER_HEAD),
    "latent in CUDA": (MIXED, TEAM),
    "latent by teams": (MIXED, TEAM | {"n_warps": 12}),
    "latent by words": (MIXED, {"block_rows": 32, "n_splits": 2, "n_heads": 1}),
    "heads together": (HEADS, {"n_splits": 2, "n_heads": 4}),
    "latent q8_0": (MIXED | {"kinds": ("q8_0", "q8_0")}, TILES),
    "latent mixed": (MIXED, TILES),
    "per head mixed": (HEADS | {"queries": 3}, None),
    "latent": ({"kinds": ("bf16", "bf16"), "lengths": (130, 70), **LATENT}, None),
    "per head": ({"kinds": ("bf16",) * 3, "lengths": (105, 0), "heads": (32, 8)}, None),
}
"""The fields of a case, and those of a choice that the table may make otherwise."""
OF_PARTS = ("latent by teams",)
"""Cases that racecheck leaves out: it reports hazards across barriers of a part of a block, as of three teams. The same
code with one team, whose barriers are its block's, is "latent in CUDA"; between barriers of the block teams share no
memory."""


def check_case(name: str) -> None:
    """Compare one case with float64, and read with lengths far beyond what is allocated, which are clamped."""
    sys.path.insert(0, str(ROOT))
    import torch
    from tests.ops.decode_cases import Case, arguments, expected

    from caramba import kernels
    from caramba.ops.dba_decode import dba_decode

    if kernels.load("cuda")["dba_decode"] != "triton":
        raise SystemExit("sanitize: the Triton kernel did not load; see the message above")
    fields, choice = CASES[name]
    if choice is not None:
        from caramba.kernels.triton import dba_decode as launcher
        from caramba.kernels.triton.dba_decode_table import DecodeConfig

        launcher.choose = lambda shape, n_processors: DecodeConfig(**choice)
    case = Case(**fields, capacity=384)
    args, options = arguments(case, torch.bfloat16, "cuda")
    out, _ = dba_decode(*args, **options)
    wanted, _ = expected(case, args, options)
    error = float((out.double().cpu() - wanted).norm() / wanted.norm())
    if not error < 2.5e-2:
        raise SystemExit(f"sanitize: {name}: relative error {error:.1e}")
    args[5].fill_(10**6)
    if "n_packed" in options:
        options["n_packed"].fill_(10**6)
    dba_decode(*args, **options)
    torch.cuda.synchronize()
    print(f"{name}: error {error:.1e}", flush=True)


def find_tool() -> str | None:
    """Return the path of compute-sanitizer, if the machine has one."""
    return shutil.which("compute-sanitizer", path=os.pathsep.join((os.environ.get("PATH", ""), *PLACES)))


def main() -> int:
    parser = argparse.ArgumentParser(description="Decode attention under compute-sanitizer")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of all cases together")
    parser.add_argument("--tool", default="memcheck,racecheck", help="tools of compute-sanitizer")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        check_case(options.case)
        return 0
    tool = find_tool()
    if tool is None:
        print(
            f"sanitize: compute-sanitizer is not on this machine (not in PATH, {', '.join(PLACES)}); nothing was "
            "checked. It comes with the CUDA toolkit (package cuda-sanitizer)",
            file=sys.stderr,
        )
        return MISSING
    ends = time.monotonic() + options.seconds
    script = [sys.executable, __file__, "--case"]
    # Inside the tool every allocation is one of the driver's, or a read past a tensor would meet its neighbour.
    bare = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with ThreadPoolExecutor(len(CASES)) as pool:
        compiled = list(pool.map(lambda name: subprocess.run([*script, name]).returncode, CASES))
    if any(compiled):
        return 1

    def check(job: tuple[str, str]) -> tuple[bool, str]:
        kind, name = job
        command = [tool, "--tool", kind, "--error-exitcode", str(FOUND_ERRORS), *script, name]
        left = max(ends - time.monotonic(), 0.1)
        try:
            done = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=left)
        except subprocess.TimeoutExpired:
            return False, f"{kind}, {name}: no time left, not checked"
        lines = [line for line in done.stdout.splitlines() if line.startswith("=========")]
        if done.returncode == 0:
            return True, f"{kind}, {name}: clean: {lines[-1].strip('= ') if lines else 'no output'}"
        tail = lines[:20] or done.stderr.strip().splitlines()[-5:]
        return False, "\n".join((f"{kind}, {name}: FAILED, status {done.returncode}", *tail))

    tools = options.tool.split(",")
    jobs = [(kind, name) for kind in tools for name in CASES if kind != "racecheck" or name not in OF_PARTS]
    is_clean = True
    with ThreadPoolExecutor(len(CASES)) as pool:
        for clean, report in pool.map(check, jobs):
            is_clean &= clean
            print(report, flush=True)
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
