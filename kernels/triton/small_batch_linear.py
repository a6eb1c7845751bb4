"""Launcher of `caramba::small_batch_linear`, and its kernel for one row, and for few of 32 bits: one program reads whole rows
of the weight, all of them at once. More rows of 16 bits take tensor cores (`small_batch_gemm`), and codes of 4 bits kernels of
their own (`int4_gemv`). A weight may be int8 codes, of which a row shares a scale: sums are of codes, and are scaled once.

Nothing is staged: the rows of a tile are in registers, so that every thread waits for many loads of 16 bytes at a time,
and a few programs on each multiprocessor keep memory busy. The rows of x come from the cache. Sums have one fixed order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from caramba.kernels.triton.int4_gemv import int4_gemv
from caramba.kernels.triton.launch import Launches
from caramba.kernels.triton.pdl import pdl_options, supports_pdl
from caramba.kernels.triton.signature import dtype_of
from caramba.kernels.triton.small_batch_gemm import small_batch_gemm
from torch import Tensor

import triton
import triton.language as tl

TABLE = Path(__file__).with_name("small_batch_linear_table.json")
"""Tiles that were measured on an H200 (docs/benchmarks/row_linear.json); others follow from `heuristic_tile`."""
HALF_PRECISION = (torch.bfloat16, torch.float16)
PROGRAMS = 512
"""Programs that share out a small product evenly: four on each multiprocessor of an H200. Of 2,048 features 3,072 rows
by 768 programs took as long as 2,432 by 304."""
PER_THREAD = 256
"""Bytes of the weight that a thread asks for at once: 16 loads."""


class GemvTile(NamedTuple):
    """Tile config: weight rows per program (of gate and up each if gated), and warps that share every row."""

    block_n: int
    warps: int


class GemvShape(NamedTuple):
    """What a tile is chosen by: rows of the result and of x, width, bytes of a number of the weight, gated or not."""

    n_out: int
    width: int
    rows: int
    itemsize: int
    is_gated: bool


_measured: dict[GemvShape, GemvTile] = {}


@triton.jit
def _load(ptr, mask, IS_WHOLE: tl.constexpr):
    """Load what many programs read, of zeros outside."""
    if IS_WHOLE:
        return tl.load(ptr)
    return tl.load(ptr, mask=mask, other=0.0)


@triton.jit
def _load_once(ptr, mask, IS_WHOLE: tl.constexpr):
    """Load what no other program reads."""
    if IS_WHOLE:
        return tl.load(ptr, eviction_policy="evict_first")
    return tl.load(ptr, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _product(tile, row, scale, bias, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, DTYPE: tl.constexpr):
    """Return the tile's product with a row of x, with its scale and bias, rounded, in fp32."""
    y = tl.sum(tile.to(tl.float32) * row[None, :], axis=1)
    if HAS_SCALE:
        y *= scale
    if HAS_BIAS:
        y += bias.to(tl.float32)
    return y.to(DTYPE).to(tl.float32)


@triton.jit
def _kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    norm_ptr,
    y_ptr,
    n_out,
    width,
    eps,
    ROWS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    HAS_SCALE: tl.constexpr = scale_ptr is not None
    HAS_BIAS: tl.constexpr = bias_ptr is not None
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = n < n_out
    col = tl.arange(0, BLOCK_K)
    in_width = col < width
    # Everything is asked for before anything is waited for: what is small and in the cache, then the weight.
    if ROWS == 1:
        first = _load(x_ptr + col, in_width, IS_WHOLE)
    if norm_ptr is not None:
        gain = _load(norm_ptr + col, in_width, IS_WHOLE)
    scale = tl.load(scale_ptr + n, mask=in_rows, other=0.0) if HAS_SCALE else 1.0
    up_scale = tl.load(scale_ptr + n + n_out, mask=in_rows, other=0.0) if HAS_SCALE and GATED else 1.0
    bias = tl.load(bias_ptr + n, mask=in_rows, other=0.0) if HAS_BIAS else 0.0
    up_bias = tl.load(bias_ptr + n + n_out, mask=in_rows, other=0.0) if HAS_BIAS and GATED else 0.0
    if ROWS == 1 and residual_ptr is not None:
        held = tl.load(residual_ptr + n, mask=in_rows, other=0.0)
    mask = in_rows[:, None] & in_width[None, :]
    at = n.to(tl.int64)[:, None] * width + col[None, :]
    tile = _load_once(weight_ptr + at, mask, IS_WHOLE)
    if GATED:
        up_at = (n.to(tl.int64) + n_out)[:, None] * width + col[None, :]
        up_tile = _load_once(weight_ptr + up_at, mask, IS_WHOLE)
    for r in tl.static_range(ROWS):
        x = first if ROWS == 1 else _load(x_ptr + r * width + col, in_width, IS_WHOLE)
        row = x.to(tl.float32)
        if HAS_NORM:
            row = row * (1.0 / tl.sqrt(tl.sum(row * row, axis=0) / width + eps))
            if norm_ptr is not None:
                row = row * gain.to(tl.float32)
            row = row.to(x.dtype).to(tl.float32)  # as the norm alone would have left it
        y = _product(tile, row, scale, bias, HAS_SCALE, HAS_BIAS, DTYPE)
        if GATED:
            up = _product(up_tile, row, up_scale, up_bias, HAS_SCALE, HAS_BIAS, DTYPE)
            y = (y / (1.0 + tl.exp(-y)) * up).to(DTYPE).to(tl.float32)
        if residual_ptr is not None:
            if ROWS > 1:
                held = tl.load(residual_ptr + r * n_out + n, mask=in_rows, other=0.0)
            y += held.to(tl.float32)
        tl.store(y_ptr + r * n_out + n, y.to(DTYPE), mask=in_rows)


_launches = Launches(_kernel)


def heuristic_tile(product: GemvShape) -> GemvTile:
    """Return the tile of a product that nobody has measured.

    Warps share a row so that each keeps few numbers of x and many of the weight; tiles shrink until the device is full,
    and where rows of x also need registers.
    """
    n_out, width, rows, itemsize, is_gated = product
    block_k = block_of(width)
    warps = min(max(block_k // (1024 if block_k >= 8192 else 512), 1), 16)
    bytes_of_row = max(block_k * itemsize // (32 * warps), 1)
    block_n = max(PER_THREAD // bytes_of_row // (2 if is_gated else 1) // (2 if rows > 2 else 1), 1)
    block_n = min(block_n, 32)
    while block_n > 1 and -(-n_out // block_n) < PROGRAMS:
        block_n //= 2
    return GemvTile(1 << (block_n.bit_length() - 1), 1 << (warps.bit_length() - 1))


def block_of(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def tile_of(product: GemvShape) -> GemvTile:
    """Return the measured tile of a product, else a heuristic_tile one."""
    if not _measured and TABLE.is_file():
        load_tuned([tuple(entry) for entry in json.loads(TABLE.read_text())["tiles"]])
    return _measured.get(product) or heuristic_tile(product)


def load_tuned(entries: list[tuple[list, list]]) -> None:
    """Use measured tiles: pairs of the fields of `GemvShape` and of `GemvTile`. Later launches choose again."""
    _measured.update({GemvShape(*product): GemvTile(*tile) for product, tile in entries})
    _launches.made.clear()


def small_batch_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    norm: Tensor | None,
    eps: float | None,
    gated: bool,
) -> Tensor:
    width = x.shape[-1]
    n_out = weight.shape[0] // (2 if gated else 1)
    y = x.new_empty((*x.shape[:-1], n_out))
    if not n_out:
        return y
    rows = x.numel() // width
    x = x.contiguous()
    residual = residual if residual is None else residual.contiguous()
    scale = scale if scale is None else scale.contiguous()
    bias = bias if bias is None else bias.contiguous()
    norm = norm if norm is None else norm.contiguous()
    if weight.dtype == torch.int16 and scale is not None:
        return int4_gemv(x, weight.contiguous(), scale, bias, residual, norm, eps, gated, y)
    dtypes = (x.dtype, weight.dtype, dtype_of(scale), dtype_of(bias), dtype_of(residual), dtype_of(norm))
    if rows > 1 and weight.dtype in (x.dtype, torch.int8) and x.dtype in HALF_PRECISION:
        return small_batch_gemm(x, weight.contiguous(), scale, bias, residual, norm, eps, gated, y)
    key = (rows, n_out, width, eps, gated, x.get_device(), dtypes)
    launch = _launches.get(key)
    if launch is None:
        of_weight = torch.float32 if scale is None else torch.int8
        if not {x.dtype, weight.dtype} <= {torch.bfloat16, torch.float16, torch.float32, of_weight}:
            raise ValueError(f"small_batch_linear: got {x.dtype} and {weight.dtype}, expected 16 or 32 bits on a GPU")
        block_n, warps = tile_of(GemvShape(n_out, width, rows, weight.element_size(), gated))
        block_k = block_of(width)
        is_whole = block_k == width and n_out % block_n == 0
        early = supports_pdl(x.device)
        launch = _launches.add(
            *(key, (-(-n_out // block_n),), (n_out, width, 0.0 if eps is None else eps)),
            *(rows, eps is not None, gated, is_whole, block_n, block_k, early),
            num_warps=warps,
            **pdl_options(early),
        )
    launch(x, weight.contiguous(), scale, bias, residual, norm, y)
    return y
