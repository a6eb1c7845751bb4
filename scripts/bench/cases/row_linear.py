"""Products of a decode step's few rows against torch's: microseconds and share of the read roof. Writes JSON.

Usage on a GPU: python scripts/bench/run.py row_linear [--codes 8|4] [--tune] [--compiled] [--rows 1,2,4,8]
    [--out FILE]
Weights are of a model of a billion weights; every side runs as a CUDA graph over as many weights as exceed the cache.
`--tune` first times tiles of one row and writes the fastest next to the kernel, where later processes find them.
`--compiled` adds products as reductions that Inductor makes. `--codes 8`: weights are codes of 8 bits with a scale of
each row, or of 4 with one and a zero of each group of inputs (`--codes 4`), against the same weights in 16 bits by ours
(`numbers`). `--device cpu --size tiny` with TRITON_INTERPRET=1 shows that it works.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cases.kernels import COLD_BYTES, Side
from record import Record
from timing import interleave, read_rate
from torch import Tensor

from caramba import kernels
from caramba.lower.quantize.int4 import group_of, quantize_int4
from caramba.ops import backend
from caramba.ops.small_batch_linear import WORDS, dequantize_int4, small_batch_linear
from caramba.runs.files import write_json

KERNEL = importlib.import_module("caramba.kernels.triton.small_batch_linear")
NAMES = {16: "", 8: "_codes", 4: "_codes4"}
"""Of files, by the bits of a number of the weight."""
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


Given = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]
"""x, weight, its scale if it is codes, residual and norm."""


def make_tensors(
    shape: Shape, rows: int, dtype: torch.dtype, device: torch.device, *, bits: int = 16
) -> Given:
    """Return what a product is of: a weight of the dtype, or its codes of 8 bits or 4."""

    def random_tensor(*size: int) -> Tensor:
        return torch.randn(size, dtype=dtype, device=device)

    weight, scale = random_tensor(shape.n_rows, shape.width) * shape.width**-0.5, None
    if bits == 4:
        group = group_of(shape.width)
        assert group is not None
        weight, scale = quantize_int4(weight, group)
    elif bits == 8:
        scale = weight.float().abs().amax(1) / 127
        weight = (weight / scale[:, None]).round().to(torch.int8)
    x, residual = random_tensor(rows, shape.width), random_tensor(rows, shape.n_out)
    return x, weight, scale, residual, random_tensor(shape.width)


def numbers_of(weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the weight that codes stand for."""
    if scale is not None and weight.dtype == WORDS:
        return dequantize_int4(weight, scale, dtype)
    if scale is None:
        return weight
    return (weight * scale[:, None].to(torch.promote_types(dtype, scale.dtype))).to(dtype)


def ours(shape: Shape) -> Callable[..., Tensor]:
    """Return the op on what `make_tensors` returns."""

    def call(x: Tensor, weight: Tensor, scale: Tensor | None, residual: Tensor, norm: Tensor) -> Tensor:
        return small_batch_linear(
            x,
            weight,
            scale=scale,
            residual=residual if shape.has_residual else None,
            norm=norm if shape.is_normed else None,
            eps=1e-5 if shape.is_normed else None,
            gated=shape.is_gated,
        )

    return call


def by_torch(shape: Shape) -> Callable[..., Tensor]:
    """Return the same by torch's own calls."""

    def call(x: Tensor, weight: Tensor, scale: Tensor | None, residual: Tensor, norm: Tensor) -> Tensor:
        if shape.is_normed:
            x = F.rms_norm(x, (shape.width,), norm, 1e-5)
        y = alone(x, weight, scale, residual, norm)
        if shape.is_gated:
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        return y + residual if shape.has_residual else y

    return call


def alone(x: Tensor, weight: Tensor, scale: Tensor | None, residual: Tensor, norm: Tensor) -> Tensor:
    """Return the library's product alone.

    torchao multiplies codes of 8 bits; codes of 4 bits use a weight made for it.
    """
    if scale is not None and weight.dtype == WORDS:
        return F.linear(x, dequantize_int4(weight, scale, x.dtype))
    return F.linear(x, weight) if scale is None else (F.linear(x, weight.to(x.dtype)) * scale).to(x.dtype)


def n_sets(n_bytes: int, device: torch.device) -> int:
    """Return how many weights together exceed the cache."""
    return min(max(2, -(-COLD_BYTES // n_bytes)), 64) if device.type == "cuda" else 1


def time_products(sides: dict[str, Side], seconds: float) -> dict[str, float]:
    """Return the median microseconds of every side, which take turns."""
    calls = {name: side.seconds for name, side in sides.items()}
    times = interleave(calls, repeats=3, warm=2, seconds=seconds)
    return {name: 1e6 * statistics.median(values) for name, values in times.items()}


def bytes_of(shape: Shape, dtype: torch.dtype, bits: int) -> int:
    """Return the bytes of a weight, with scales and zeros of groups."""
    n = shape.n_rows * shape.width
    if bits == 4:
        return n // 2 + 4 * n // (group_of(shape.width) or n)
    return n * (dtype.itemsize if bits == 16 else 1)


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
    shapes: tuple[Shape, ...], dtype: torch.dtype, device: torch.device, *, bits: int
) -> list[list[list[Any]]]:
    """Return the fastest tile of each product of one row, in the form of the kernel's table."""
    entries = []
    for shape in shapes:
        itemsize = dtype.itemsize if bits == 16 else 1
        product = [shape.n_out, shape.width, 1, itemsize, shape.is_gated]
        n = n_sets(bytes_of(shape, dtype, bits), device)
        some = [make_tensors(shape, 1, dtype, device, bits=bits) for _ in range(n)]
        found = {}
        for tile in tiles(shape, itemsize):
            KERNEL.load_tuned([(product, list(tile))])
            found[tile] = time_products({"ours": Side(ours(shape), some, False)}, 0.05)["ours"]
        best = min(found, key=lambda tile: found[tile])
        KERNEL.load_tuned([(product, list(best))])
        entries.append([product, list(best)])
        print(f"{shape.name}: {sorted(found.items(), key=lambda one: one[1])}", flush=True)
    return entries


def keep_tiles(table: Path, tiles: list[list[list[Any]]]) -> None:
    """Write tiles to the kernel's table, in the place of those of the same products."""
    kept = {tuple(product): tile for product, tile in json.loads(table.read_text())["tiles"]}
    kept |= {tuple(product): tile for product, tile in tiles}
    found = [[list(product), tile] for product, tile in kept.items()]
    write_json(table, {"device": torch.cuda.get_device_name(), "tiles": found})


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
    some = [make_tensors(shape, n_rows, dtype, device, bits=bits) for _ in range(n_sets(n_bytes, device))]
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
OPTIONS = "--size=1b|tiny --rows=1,2,4,8,16,32,64 --codes=16|8|4 --tune --compiled"


def run(words: argparse.Namespace, record: Record) -> None:
    device, bits = record.device, int(words.codes)
    record.default(f"row_linear{NAMES[bits]}.json")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kernels.load(device)
    if device.type == "cpu":
        backend.attach("small_batch_linear", "cpu", "triton", KERNEL.small_batch_linear)
    shapes = SHAPES[words.size]
    record.start(codes=bits < 16, bits=bits)
    if words.tune and bits > 4:
        record.data["tiles"] = tune(shapes, dtype, device, bits=bits)
        if device.type == "cuda":
            keep_tiles(KERNEL.TABLE, record.data["tiles"])
    roof = read_rate(device)
    record.save(read_bytes_per_s=roof)
    for n_rows, shape in itertools.product(words.rows, shapes):
        options = {"is_compiled": words.compiled, "bits": bits}
        record.add(measure_products(shape, n_rows, dtype, device, roof, **options))
