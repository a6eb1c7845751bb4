"""Tiles of products of few rows: which are worth timing, and which are the fastest."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from cases.kernel_case import Side
from cases.row_linear_cases import Shape, bytes_of, made, n_sets, ours, time_products

from caramba.runs.files import write_json


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
    shapes: tuple[Shape, ...], rows: list[int], dtype: torch.dtype, device: torch.device, *, bits: int
) -> list[list[list[Any]]]:
    """Return the fastest tile of each product, in the form of the kernel's table."""
    module = importlib.import_module("caramba.kernels.triton.small_batch_linear")
    entries = []
    for shape in shapes:
        for n_rows in rows:
            itemsize = dtype.itemsize if bits == 16 else 1
            product = [shape.n_out, shape.width, n_rows, itemsize, shape.is_gated]
            some = [
                made(shape, n_rows, dtype, device, bits=bits)
                for _ in range(n_sets(bytes_of(shape, dtype, bits), device))
            ]
            found = {}
            for tile in tiles(shape, itemsize):
                module.load_tuned([(product, list(tile))])
                found[tile] = time_products({"ours": Side(ours(shape), some, False)}, 0.05)["ours"]
            best = min(found, key=lambda tile: found[tile])
            module.load_tuned([(product, list(best))])
            entries.append([product, list(best)])
            said = ", ".join(
                f"{tile}: {us:.2f}" for tile, us in sorted(found.items(), key=lambda one: one[1])
            )
            print(f"{shape.name}, {n_rows} rows: {said}", flush=True)
    return entries


def keep_tiles(table: Path, tiles: list[list[list[Any]]]) -> None:
    """Write tiles to the kernel's table, in the place of those of the same products."""
    kept = {tuple(product): tile for product, tile in json.loads(table.read_text())["tiles"]}
    kept |= {tuple(product): tile for product, tile in tiles}
    found = [[list(product), tile] for product, tile in kept.items()]
    write_json(table, {"device": torch.cuda.get_device_name(), "tiles": found})
