"""Casts to float8 beside what Inductor makes of the reference, and products of float8 numbers beside bfloat16's. JSON.

For the matrices of a 1B training step of 8 x 2048: milliseconds, bytes that have to move (the input twice, both results
once) over the time, and TFLOP/s. Eager casts and products, each on fresh memory, the median of some.

Usage on a GPU: python scripts/bench/run.py float8_casts [--out docs/benchmarks/float8_casts.json] [--seconds 90]
`--rows 64 --repeats 1 --out FILE` shows on a CPU that it works.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from record import Record, machine_facts
from timing import device_seconds
from torch import Tensor

from caramba import kernels
from caramba.layer.float8 import float8_mm
from caramba.ops import implementation
from caramba.ops.float8_cast import float8_cast, reference_float8_cast
from caramba.ops.float8_swiglu import (
    float8_swiglu,
    float8_swiglu_backward,
    reference_float8_swiglu,
    reference_float8_swiglu_backward,
)

WIDTHS = (2048, 3072, 8192, 16384)
PRODUCTS = ((2048, 3072), (2048, 16384), (8192, 2048), (2048, 2048))  # features in and out of a layer
COLD = 2**27  # bytes that are written between two calls, twice what an L2 holds


def milliseconds(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Return the median time of a call on a cold cache."""
    spoil = torch.empty(COLD if device.type == "cuda" else 16, dtype=torch.uint8, device=device)
    call()
    taken = []
    for _ in range(repeats):
        spoil.zero_()
        taken.append(device_seconds(call, device, queue_cycles=100_000))
    return 1e3 * statistics.median(taken)


def casts(
    rows: int, width: int, x: Callable[..., Tensor]
) -> Iterator[tuple[str, Callable[[], Any], Any, int]]:
    """Yield name, call, its reference's and bytes of every cast at a width."""
    given, half = x(rows, width), width // 2
    for per_tensor in (False, True):
        how = "one scale" if per_tensor else "by row"
        yield (
            f"cast {how}",
            partial(float8_cast, given, per_tensor=per_tensor),
            partial(reference_float8_cast, given, per_tensor, False),
            6 * rows * width,
        )
        if width < max(WIDTHS):
            continue
        grad, scales = x(rows, half), (torch.ones(n, 1, device=given.device) for n in (rows, half))
        gradient = (grad, *scales, given)
        yield (
            f"swiglu {how}",
            partial(float8_swiglu, given, per_tensor=per_tensor),
            partial(reference_float8_swiglu, given, per_tensor),
            (4 * width + 2 * half) * rows,
        )
        yield (
            f"swiglu's gradient {how}",
            partial(float8_swiglu_backward, *gradient, per_tensor=per_tensor),
            partial(reference_float8_swiglu_backward, *gradient, per_tensor, per_tensor),
            (4 * width + 4 * half + 2 * width) * rows,
        )


def products(rows: int, n_in: int, n_out: int, x: Callable[..., Tensor]) -> dict[str, Callable[[], Any]]:
    """Return the forward product of a layer, by how it is made."""
    a, b = x(rows, n_in), x(n_out, n_in)
    calls: dict[str, Callable[[], Any]] = {"bfloat16": lambda: a @ b.t()}
    for per_tensor in (False, True):
        (a8, a_scale, *_), (b8, b_scale, *_) = (float8_cast(one, per_tensor=per_tensor) for one in (a, b))
        for fast in (True, False):
            if per_tensor or fast:
                calls[f"{'one scale' if per_tensor else 'by row'}, {'fast' if fast else 'exact'} sums"] = (
                    partial(float8_mm, a8, b8, a_scale, b_scale, torch.bfloat16, use_fast_accum=fast)
                )
    return calls


SMOKE_OPTIONS = ("--rows", "16", "--repeats", "1", "--seconds", "0")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=90.0, help="after which no further row is begun")


def run(words: argparse.Namespace, record: Record) -> int | None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernels.load(device)
    deadline, rows, found = time.monotonic() + words.seconds, words.rows, []
    generator = torch.Generator(device).manual_seed(0)

    def drawn(m: int, n: int) -> Tensor:
        return torch.randn(m, n, device=device, generator=generator).bfloat16()

    def note(row: dict[str, Any]) -> None:
        found.append(row)
        said = (
            f"{key} {value:.4g}" if isinstance(value, float) else f"{value}" for key, value in row.items()
        )
        print(", ".join(said), flush=True)

    for n_in, n_out in PRODUCTS:
        for name, call in products(rows, n_in, n_out, drawn).items():
            if time.monotonic() < deadline:
                ms = milliseconds(call, device, words.repeats)
                tflops = 2 * rows * n_in * n_out / ms / 1e9
                note({"what": f"product, {name}", "shape": [rows, n_in, n_out], "tflops": tflops, "ms": ms})
    for width in WIDTHS:
        for name, ours, reference, moved in casts(rows, width, drawn):
            for side, call in (("caramba", ours), ("torch.compile", torch.compile(reference, dynamic=False))):
                if time.monotonic() < deadline:
                    ms = milliseconds(call, device, words.repeats)
                    row = {"what": name, "shape": [rows, width], "side": side}
                    note(row | {"tb_s": moved / ms / 1e9, "ms": ms})
    record.write_data(
        {
            **record.head(machine_facts(device)),
            "implementation": implementation("float8_cast", device),
            "rows": found,
        },
    )
    return 0
