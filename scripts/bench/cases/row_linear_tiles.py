"""Tiles of products of few rows: which are worth timing, and which are the fastest."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from cases.kernel_case import Side
from cases.row_linear_cases import Shape, bytes_of, made, n_sets, ours, timed

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
                found[tile] = timed({"ours": Side(ours(shape), some, False)}, 0.05)["ours"]
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


def word_tiles_of(shape: Shape) -> list[tuple[int, ...]]:
    """The same of codes of 4 bits, whose tiles are of one group."""
    if shape.n_rows < 8192:
        return [(n, 128, 1, split, 4, stages) for n in (64, 128) for split in (2, 4, 8) for stages in (3, 6)]
    return [
        (n, 128, 1, 1, warps, stages) for n, warps in ((64, 4), (128, 4), (128, 8)) for stages in (3, 4, 6)
    ]


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
    shapes: tuple[Shape, ...], rows: list[int], dtype: torch.dtype, device: torch.device, *, bits: int
) -> None:
    """Print the fastest tiles of several rows beside the one that the kernel chooses.

    Of codes of 4 bits few rows, too, which another kernel takes otherwise.
    """
    module = importlib.import_module("caramba.kernels.triton.small_batch_gemm")
    by_words = importlib.import_module("caramba.kernels.triton.int4_gemv")
    most, by_words.MOST_IN_CUDA = by_words.MOST_IN_CUDA, 0
    for shape in shapes:
        n_bytes = bytes_of(shape, dtype, bits)
        for n_rows in (n for n in rows if n > 1):
            count = n_sets(n_bytes, device)
            some = [made(shape, n_rows, dtype, device, bits=bits) for _ in range(count)]
            product = module.Product(shape.n_out, shape.width, module.block_of(n_rows), shape.is_gated, bits)
            chosen, found = module.tile_of(product), {}
            others = word_tiles_of(shape) if bits == 4 else row_tiles_of(shape, product.block_m)
            for tile in (chosen, *others):
                module.load_tuned({product: module.Tile(*tile)})
                found[tuple(tile)] = timed({"ours": Side(ours(shape), some, False)}, 0.02)["ours"]
            module.load_tuned({product: chosen})
            best = sorted(found, key=lambda tile: found[tile])[:4]
            said = ", ".join(f"{tile}: {found[tile]:.2f}" for tile in best)
            print(f"{shape.name}, {n_rows} rows: chosen {found[tuple(chosen)]:.2f} us; {said}", flush=True)
    by_words.MOST_IN_CUDA = most


def ways_of(shape: Shape) -> list[tuple[int, int, int]]:
    """Return ways of codes of 4 bits worth trying, in the fields of the kernel's `TileConfig`."""
    n_groups = shape.width // 128
    return [
        (tiles, warps, ahead)
        for tiles in (1, 2, 4)
        for warps in (1, 2, 4, 8, 16)
        for ahead in (1, 2, 4, 8)
        if warps <= n_groups and ahead <= max(1, n_groups // warps) and tiles * ahead <= 8
    ]


def time_ways(shapes: tuple[Shape, ...], rows: list[int], dtype: torch.dtype, device: torch.device) -> None:
    """Print the fastest ways of codes of 4 bits beside the one that the kernel chooses.

    Each is another kernel for NVRTC to compile, so that those of a number of rows take a minute.
    """
    module = importlib.import_module("caramba.kernels.triton.int4_gemv")
    form = importlib.import_module("caramba.kernels.cuda.int4_gemv")
    for shape in shapes:
        for n_rows in rows:
            count = n_sets(bytes_of(shape, dtype, 4), device)
            some = [made(shape, n_rows, dtype, device, bits=4) for _ in range(count)]
            product = form.Product(shape.n_out, shape.width, form.most_rows(n_rows), shape.is_gated)
            chosen, found = tuple(module.launch_config(product)), {}
            for way in (chosen, *ways_of(shape)):
                module.load_tuned({product: form.TileConfig(*way)})
                found[way] = timed({"ours": Side(ours(shape), some, False)}, 0.02)["ours"]
            module.load_tuned({product: form.TileConfig(*chosen)})
            best = sorted(found, key=lambda way: found[way])[:4]
            said = ", ".join(f"{way}: {found[way]:.2f}" for way in best)
            print(f"{shape.name}, {n_rows} rows: chosen {chosen} {found[chosen]:.2f} us; {said}", flush=True)
