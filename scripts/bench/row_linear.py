"""Products of a decode step's few rows beside torch's: microseconds and share of the read roof. Writes JSON.

Usage on a GPU: python scripts/bench/row_linear.py [--tune] [--tiles] [--compiled] [--rows 1,2,4,8] [--out FILE]
Weights are of a model of a billion weights; every side runs as a CUDA graph over as many weights as exceed the cache.
`--tune` first times tiles of one row and writes the fastest beside the kernel, where later processes find them.
`--tiles` times those of several rows, which follow a rule, beside the rule's choice. `--compiled` adds products as
reductions that Inductor makes. `--device cpu --size tiny` with TRITON_INTERPRET=1 shows that it works.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from kernel_case import COLD_BYTES, Side
from machine_facts import machine
from torch import Tensor

from caramba import kernels
from caramba.ops import backend
from caramba.ops.row_linear import row_linear
from caramba.runs.files import write_json

MUST = 0.85
"""Share of the read roof on the widest products."""


@dataclass(frozen=True)
class Shape:
    """One product of a block: rows of the result, width, and what runs in the same pass."""

    name: str
    n_out: int
    width: int
    is_gated: bool = False
    is_normed: bool = False
    has_residual: bool = False

    @property
    def n_rows(self) -> int:
        """Rows of the weight."""
        return self.n_out * (2 if self.is_gated else 1)


SHAPES = {
    "1b": (
        Shape("queries, keys, values", 3072, 2048, is_normed=True),
        Shape("out", 2048, 2048, has_residual=True),
        Shape("gate, up", 8192, 2048, is_gated=True, is_normed=True),
        Shape("down", 2048, 8192, has_residual=True),
        Shape("head", 128256, 2048),
    ),
    "tiny": (Shape("gate, up", 8, 512, is_gated=True, is_normed=True),),
}


def made(shape: Shape, rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Return x, weight, residual and norm."""

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, dtype=dtype, device=device)

    return (
        drawn(rows, shape.width),
        drawn(shape.n_rows, shape.width) * shape.width**-0.5,
        drawn(rows, shape.n_out),
        drawn(shape.width),
    )


def ours(shape: Shape) -> Callable[..., Tensor]:
    """Return the op on what `made` returns."""

    def call(x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor) -> Tensor:
        return row_linear(
            x,
            weight,
            residual=residual if shape.has_residual else None,
            norm=norm if shape.is_normed else None,
            eps=1e-5 if shape.is_normed else None,
            gated=shape.is_gated,
        )

    return call


def by_torch(shape: Shape) -> Callable[..., Tensor]:
    """Return the same by torch's own calls."""

    def call(x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor) -> Tensor:
        if shape.is_normed:
            x = F.rms_norm(x, (shape.width,), norm, 1e-5)
        y = F.linear(x, weight)
        if shape.is_gated:
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        return y + residual if shape.has_residual else y

    return call


def alone(x: Tensor, weight: Tensor, residual: Tensor, norm: Tensor) -> Tensor:
    """Return the library's product and nothing else."""
    return F.linear(x, weight)


def n_sets(n_bytes: int, device: torch.device) -> int:
    """Return how many weights together exceed the cache."""
    return min(max(2, -(-COLD_BYTES // n_bytes)), 64) if device.type == "cuda" else 1


def timed(sides: dict[str, Side], seconds: float) -> dict[str, float]:
    """Return the median microseconds of every side, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    deadline = time.perf_counter() + seconds
    while len(times[next(iter(sides))]) < 5 or time.perf_counter() < deadline:
        for name, side in sides.items():
            times[name].append(side.seconds() * 1e6)
    return {name: statistics.median(values[2:]) for name, values in times.items()}


def tiles(shape: Shape, itemsize: int) -> list[tuple[int, int]]:
    """Return rows of a tile and warps worth trying: 128 to 512 bytes of the weight to a thread."""
    width = 1 << (shape.width - 1).bit_length()
    parts = 2 if shape.is_gated else 1
    return [
        (block_n, warps)
        for warps in (1, 2, 4, 8, 16)
        for block_n in (1, 2, 4, 8, 16)
        if 128 <= block_n * parts * width * itemsize // (32 * warps) <= 512 and width // (32 * warps) >= 8
    ]


def tune(
    shapes: tuple[Shape, ...], rows: list[int], dtype: torch.dtype, device: torch.device
) -> list[list[list[Any]]]:
    """Return the fastest tile of each product, in the form of the kernel's table."""
    module = importlib.import_module("caramba.kernels.triton.row_linear")
    entries = []
    for shape in shapes:
        for n_rows in rows:
            itemsize = torch.empty(0, dtype=dtype).element_size()
            product = [shape.n_out, shape.width, n_rows, itemsize, shape.is_gated]
            some = [
                made(shape, n_rows, dtype, device)
                for _ in range(n_sets(shape.n_rows * shape.width * itemsize, device))
            ]
            found = {}
            for tile in tiles(shape, itemsize):
                module.adopt([(product, list(tile))])
                found[tile] = timed({"ours": Side(ours(shape), some, False)}, 0.05)["ours"]
            best = min(found, key=lambda tile: found[tile])
            module.adopt([(product, list(best))])
            entries.append([product, list(best)])
            said = ", ".join(
                f"{tile}: {us:.2f}" for tile, us in sorted(found.items(), key=lambda one: one[1])
            )
            print(f"{shape.name}, {n_rows} rows: {said}", flush=True)
    return entries


def row_tiles_of(shape: Shape, block_m: int) -> list[tuple[int, ...]]:
    """Return tiles of several rows worth trying, in the fields of the kernel's `Tile`: tiles on their way of 40 to
    200 KiB in a multiprocessor's shared memory."""
    found = []
    is_narrow = shape.n_rows < 8192
    for block_n, block_k, warps_k, split, warps in (
        *((n, k, w, 1, w) for n in (16, 32) for k, w in ((128, 4), (256, 4), (512, 8))),
        *(
            (n, k, 1, s, n // 16)
            for n in (64, 128)
            for k in (64, 128)
            for s in ((2, 4, 8) if is_narrow else (1,))
        ),
    ):
        if warps_k == 1 and block_m < 16:
            continue
        bytes_of_tile = (block_n + block_m) * block_k * 2
        for size in (40, 72, 108, 200):
            stages = min(12, round(size * 1024 / bytes_of_tile))
            if stages >= 2 and stages * bytes_of_tile <= 222 * 1024:
                found.append((block_n, block_k, warps_k, split, warps, stages))
    return list(dict.fromkeys(found))


def time_row_tiles(
    shapes: tuple[Shape, ...], rows: list[int], dtype: torch.dtype, device: torch.device
) -> None:
    """Print the fastest tiles of several rows beside the one that the kernel chooses."""
    module = importlib.import_module("caramba.kernels.triton.row_tiles")
    for shape in shapes:
        n_bytes = shape.n_rows * shape.width * 2
        for n_rows in (n for n in rows if n > 1):
            some = [made(shape, n_rows, dtype, device) for _ in range(n_sets(n_bytes, device))]
            product = module.Product(shape.n_out, shape.width, module.block_of(n_rows), shape.is_gated)
            chosen, found = module.tile_of(product), {}
            for tile in (chosen, *row_tiles_of(shape, product.block_m)):
                module.adopt({product: module.Tile(*tile)})
                found[tuple(tile)] = timed({"ours": Side(ours(shape), some, False)}, 0.02)["ours"]
            module.adopt({product: chosen})
            best = sorted(found, key=lambda tile: found[tile])[:4]
            said = ", ".join(f"{tile}: {found[tile]:.2f}" for tile in best)
            print(f"{shape.name}, {n_rows} rows: chosen {found[tuple(chosen)]:.2f} us; {said}", flush=True)


def measured(
    shape: Shape, n_rows: int, dtype: torch.dtype, device: torch.device, is_compiled: bool, roof: float
) -> dict[str, Any]:
    """Return a row of the table: microseconds, share of the read roof and errors against float64."""
    n_bytes = shape.n_rows * shape.width * torch.empty(0, dtype=dtype).element_size()
    some = [made(shape, n_rows, dtype, device) for _ in range(n_sets(n_bytes, device))]
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
        want = by_torch(shape)(*(x.double() for x in some[0]))
        errors = {
            name: float((call(*some[0]).double() - want).norm() / want.norm())
            for name, call in calls.items()
            if name != "product"
        }
        sides = {name: Side(call, some, False) for name, call in calls.items()}
        found = timed(sides, 0.3)
    return {
        "name": shape.name,
        "weight": [shape.n_rows, shape.width],
        "rows": n_rows,
        "implementation": backend.implementation("row_linear", device),
        "must": MUST,
        "us": found,
        "of_roof": {name: n_bytes / us / 1e-6 / roof for name, us in found.items()},
        "error": errors,
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="1b", choices=tuple(SHAPES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", default="1,2,4,8,16,32,64")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/row_linear.json"))
    words = parser.parse_args()
    device = torch.device(words.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kernels.load(device)
    module = importlib.import_module("caramba.kernels.triton.row_linear")
    if device.type == "cpu":
        backend.attach("row_linear", "cpu", "triton", module.row_linear)
    shapes = SHAPES[words.size]
    data: dict[str, Any] = {
        "benchmark": "row_linear",
        "made_by": " ".join(["python", "scripts/bench/row_linear.py", *sys.argv[1:]]),
        "machine": machine(device),
        "rows": [],
    }
    if words.tune:
        data["tiles"] = tune(shapes, [1], dtype, device)
        if device.type == "cuda":
            write_json(module.TABLE, {"device": torch.cuda.get_device_name(), "tiles": data["tiles"]})
    if words.tiles:
        half = dtype if device.type == "cuda" else torch.float16  # Triton's interpreter has no bfloat16
        time_row_tiles(shapes, [int(n) for n in words.rows.split(",")], half, device)
    roof = 1e12
    if device.type == "cuda":
        from read_roof import read_roof

        roof = read_roof()
    data["read_bytes_per_s"] = roof
    for n_rows in (int(n) for n in words.rows.split(",")):
        for shape in shapes:
            row = measured(shape, n_rows, dtype, device, words.compiled, roof)
            data["rows"].append(row)
            said = ", ".join(
                f"{name} {us:.2f} us ({row['of_roof'][name]:.0%})" for name, us in row["us"].items()
            )
            print(f"{shape.name}, {n_rows} rows: {said}; error {row['error']['ours']:.1e}", flush=True)
            write_json(words.out, data)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
