"""Products of a decode step's few rows against torch's: microseconds and share of the read roof. Writes JSON.

Usage on a GPU: python scripts/bench/run.py row_linear [--codes [8|4]] [--tune] [--compiled] [--rows 1,2,4,8]
    [--out FILE]
Weights are of a model of a billion weights; every side runs as a CUDA graph over as many weights as exceed the cache.
`--tune` first times tiles of one row and writes the fastest next to the kernel, where later processes find them.
`--compiled` adds products as reductions that Inductor makes. `--codes`: weights are codes of 8 bits with a scale of
each row, or of 4 with one and a zero of each group of inputs (`--codes 4`), against the same weights in 16 bits by ours
(`numbers`). `--device cpu --size tiny` with TRITON_INTERPRET=1 shows that it works.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any

import torch
from cases.kernel_case import Side
from cases.row_linear_cases import (
    SHAPES,
    Shape,
    alone,
    by_torch,
    bytes_of,
    made,
    n_sets,
    numbers_of,
    ours,
    time_products,
)
from cases.row_linear_tiles import keep_tiles, tune
from record import Record, machine_facts
from torch import Tensor

from caramba import kernels
from caramba.ops import backend

NAMES = {16: "", 8: "_codes", 4: "_codes4"}
"""Of files, by the bits of a number of the weight."""
MUST = 0.85
"""Share of the read roof on the widest products."""


def measure_products(
    shape: Shape,
    n_rows: int,
    dtype: torch.dtype,
    device: torch.device,
    roof: float,
    *,
    is_compiled: bool,
    bits: int,
) -> dict[str, Any]:
    """Return a row of the table: microseconds, share of the read roof and errors against float64."""
    n_bytes = bytes_of(shape, dtype, bits)
    some = [made(shape, n_rows, dtype, device, bits=bits) for _ in range(n_sets(n_bytes, device))]
    calls: dict[str, Callable[..., Tensor]] = {
        "ours": ours(shape),
        "torch": by_torch(shape),
        "product": alone,
    }
    if is_compiled and n_rows == 1:
        torch._dynamo.reset()
        options: dict[str, Any] = {"coordinate_descent_tuning": True}
        calls["reduction"] = torch.compile(by_torch(shape), fullgraph=True, dynamic=False, options=options)
    with torch.no_grad():
        x, weight, scale, residual, norm = some[0]
        wide = numbers_of(weight if bits == 4 else weight.double(), scale, torch.float64)
        want = by_torch(shape)(x.double(), wide, None, residual.double(), norm.double())
        errors = {
            name: float((call(*some[0]).double() - want).norm() / want.norm())
            for name, call in calls.items()
            if name != "product"
        }
        sides = {name: Side(call, some, False) for name, call in calls.items()}
        if bits < 16:
            plain = [(x, numbers_of(weight, scale, dtype), None, *rest) for x, weight, scale, *rest in some]
            sides["numbers"] = Side(ours(shape), plain, False)
        found = time_products(sides, 0.3)
    return {
        "name": shape.name,
        "weight": [shape.n_rows, shape.width],
        "rows": n_rows,
        "implementation": backend.implementation("small_batch_linear", device),
        "must": MUST,
        "us": found,
        "of_roof": {name: n_bytes / us / 1e-6 / roof for name, us in found.items()},
        "error": errors,
    }


OUT = None  # a file a number of bits


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="1b", choices=tuple(SHAPES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", default="1,2,4,8,16,32,64")
    parser.add_argument("--codes", type=int, nargs="?", choices=(8, 4), const=8, default=16)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--compiled", action="store_true")


def run(words: argparse.Namespace, record: Record) -> int | None:
    record.default(f"row_linear{NAMES[words.codes]}.json")
    device = torch.device(words.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kernels.load(device)
    module = importlib.import_module("caramba.kernels.triton.small_batch_linear")
    if device.type == "cpu":
        backend.attach("small_batch_linear", "cpu", "triton", module.small_batch_linear)
    shapes = SHAPES[words.size]
    data: dict[str, Any] = {
        **record.head(machine_facts(device)),
        "codes": words.codes < 16,
        "bits": words.codes,
        "rows": [],
    }
    if words.tune and words.codes > 4:
        data["tiles"] = tune(shapes, [1], dtype, device, bits=words.codes)
        if device.type == "cuda":
            keep_tiles(module.TABLE, data["tiles"])
    roof = 1e12
    if device.type == "cuda":
        from cases.read_bandwidth import read_bandwidth

        roof = read_bandwidth()
    data["read_bytes_per_s"] = roof
    for n_rows in (int(n) for n in words.rows.split(",")):
        for shape in shapes:
            row = measure_products(
                shape, n_rows, dtype, device, roof, is_compiled=words.compiled, bits=words.codes
            )
            data["rows"].append(row)
            said = ", ".join(
                f"{name} {us:.2f} us ({row['of_roof'][name]:.0%})" for name, us in row["us"].items()
            )
            print(f"{shape.name}, {n_rows} rows: {said}; error {row['error']['ours']:.1e}", flush=True)
            record.write_data(data)
    return 0
