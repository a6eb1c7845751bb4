"""Launcher of `caramba::small_batch_linear` for weights of words, four codes of 4 bits each, and a kernel for any of them.

Rows of 16 bits whose groups are of 128 inputs take tensor cores: few by the kernel in CUDA C++ (`int4_gemv.cu`) where it
can be compiled, whose blocks read all of x for some columns each, more by tiles (`small_batch_gemm`). The kernel here is for
what is left, numbers of 32 bits and small groups: a program makes one row of x by some rows of the weight, and multiplies
codes as numbers of 32 bits.
"""

from __future__ import annotations

import caramba.kernels.cuda.int4_gemv as in_cuda
import torch
from caramba.kernels.cuda.decode import is_ready
from caramba.kernels.cuda.launch import CudaLaunch
from caramba.kernels.triton.launch import MOST, Launch, Launches
from caramba.kernels.triton.pdl import pdl_options, supports_pdl
from caramba.kernels.triton.rms_norm import rms_norm
from caramba.kernels.triton.signature import dtype_of
from caramba.kernels.triton.small_batch_gemm import small_batch_gemm
from torch import Tensor

import triton
import triton.language as tl

BLOCK_N, BLOCK_J, WARPS = 8, 256, 4
"""Rows of the weight to a program, words of each at a time, and warps."""
MOST_IN_CUDA = 16
"""Rows up to which the kernel in CUDA C++ is taken: of 32 and 64 it took longer than numbers of 16 bits (docs/log.md)."""
N_TENSORS = 7
_tuned: dict[in_cuda.Int4Shape, in_cuda.Int4Tile] = {}
_made: dict[tuple, CudaLaunch | Launch] = {}
"""What is launched for calls, of either kernel."""


@triton.jit
def _sums(words_ptr, scale_ptr, row, by, zeros, x, total, j, inside, width, BLOCK: tl.constexpr):
    """Add a tile's products with the four fields' x, and what zeros make of their sum."""
    n_words = width // 4
    n_groups = n_words // BLOCK
    word = tl.load(words_ptr + row[:, None] * n_words + j[None, :], mask=inside[None, :], other=0).to(tl.int32)
    codes = tl.zeros(word.shape, tl.float32)
    for field in tl.static_range(4):
        codes += ((word >> (4 * field)) & 15).to(tl.float32) * x[field][None, :]
    at = scale_ptr + (row[:, None] * n_groups + (j // BLOCK)[None, :]) * 2
    step = tl.load(at, mask=inside[None, :], other=0.0).to(tl.float32)
    zero = tl.load(at + 1, mask=inside[None, :], other=0.0).to(tl.float32)
    return by + codes * step, zeros + zero * total[None, :]


@triton.jit
def _normed(x_ptr, norm_ptr, at, inside, by, HAS_NORM: tl.constexpr):
    """Return numbers of x as the norm alone would have left them, in fp32."""
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    row = x.to(tl.float32)
    if HAS_NORM:
        row = row * by
        if norm_ptr is not None:
            row = row * tl.load(norm_ptr + at, mask=inside, other=0.0).to(tl.float32)
        row = row.to(x.dtype).to(tl.float32)
    return row


@triton.jit
def _words_kernel(
    x_ptr,
    words_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    norm_ptr,
    y_ptr,
    n_out,
    width,
    eps,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    BLOCK: tl.constexpr = GROUP // 4  # words of a group
    r = tl.program_id(1)
    x_ptr += r * width
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ok = column < n_out
    n = tl.minimum(column, n_out - 1).to(tl.int64)
    by = 1.0
    if HAS_NORM:
        squares = tl.zeros((BLOCK_J,), tl.float32)
        for first in range(0, width, BLOCK_J):
            at = first + tl.arange(0, BLOCK_J)
            row = tl.load(x_ptr + at, mask=at < width, other=0.0).to(tl.float32)
            squares += row * row
        by = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / width + eps)
    gate = tl.zeros((BLOCK_N, BLOCK_J), tl.float32)
    gate_zeros = tl.zeros((BLOCK_N, BLOCK_J), tl.float32)
    if GATED:
        up = tl.zeros((BLOCK_N, BLOCK_J), tl.float32)
        up_zeros = tl.zeros((BLOCK_N, BLOCK_J), tl.float32)
    for first in range(0, width // 4, BLOCK_J):
        j = first + tl.arange(0, BLOCK_J)
        inside = j < width // 4
        at = j // BLOCK * GROUP + j % BLOCK
        x0 = _normed(x_ptr, norm_ptr, at, inside, by, HAS_NORM)
        x1 = _normed(x_ptr, norm_ptr, at + BLOCK, inside, by, HAS_NORM)
        x2 = _normed(x_ptr, norm_ptr, at + 2 * BLOCK, inside, by, HAS_NORM)
        x3 = _normed(x_ptr, norm_ptr, at + 3 * BLOCK, inside, by, HAS_NORM)
        x = (x0, x1, x2, x3)
        total = (x0 + x1) + (x2 + x3)
        gate, gate_zeros = _sums(words_ptr, scale_ptr, n, gate, gate_zeros, x, total, j, inside, width, BLOCK)
        if GATED:
            up, up_zeros = _sums(words_ptr, scale_ptr, n + n_out, up, up_zeros, x, total, j, inside, width, BLOCK)
    y = tl.sum(gate + gate_zeros, axis=1)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n).to(tl.float32)
    y = y.to(DTYPE).to(tl.float32)
    if GATED:
        other = tl.sum(up + up_zeros, axis=1)
        if bias_ptr is not None:
            other += tl.load(bias_ptr + n + n_out).to(tl.float32)
        y = (y / (1.0 + tl.exp(-y)) * other.to(DTYPE).to(tl.float32)).to(DTYPE).to(tl.float32)
    if residual_ptr is not None:
        y += tl.load(residual_ptr + r * n_out + n).to(tl.float32)
    tl.store(y_ptr + r * n_out + n, y.to(DTYPE), mask=ok)


_launches = Launches(_words_kernel)


def launch_config(product: in_cuda.Int4Shape) -> in_cuda.Int4Tile:
    """Return the tuned config of a product, else the heuristic one."""
    return _tuned.get(product) or in_cuda.heuristic_tile(product)


def load_tuned(entries: dict[in_cuda.Int4Shape, in_cuda.Int4Tile]) -> None:
    """Use measured configs; later launches choose again."""
    _tuned.update(entries)
    _made.clear()


def int4_gemv(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm: Tensor | None,
    eps: float | None,
    gated: bool,
    y: Tensor,
) -> Tensor:
    """Make `small_batch_linear` of contiguous tensors and a weight of words into y, and return it."""
    width, n_out = x.shape[-1], y.shape[-1]
    rows = x.numel() // width
    if rows > 1 and _is_for_tiles(x, scale, rows):
        return small_batch_gemm(x, weight, scale, bias, residual, norm, eps, gated, y)
    if eps is not None and rows > 1:
        x, norm, eps = rms_norm(x, norm, eps)[0], None, None
    if norm is not None and norm.dtype not in (x.dtype, torch.float32):
        norm = norm.float()
    given = tuple(map(dtype_of, (x, bias, residual, norm)))
    key = (rows, n_out, width, scale.shape[1], eps, gated, x.get_device(), given)
    launch = _made.get(key)
    if launch is None:
        early = supports_pdl(x.device)
        plain = _launches.add(
            *(key, (-(-n_out // BLOCK_N), rows), (n_out, width, 0.0 if eps is None else eps)),
            *(eps is not None, gated, width // scale.shape[1], BLOCK_N, BLOCK_J, early),
            num_warps=WARPS,
            **pdl_options(early),
        )
        if len(_made) >= MOST:
            _made.clear()
        launch = _made[key] = _of_tensor_cores(key, x, bias, residual, norm, plain) or plain
    launch(x, weight, scale, bias, residual, norm, y)
    return y


def _is_for_tiles(x: Tensor, scale: Tensor, rows: int) -> bool:
    if x.dtype not in (torch.bfloat16, torch.float16) or x.shape[-1] != scale.shape[1] * in_cuda.GROUP:
        return False
    return rows > MOST_IN_CUDA or not is_ready(x.device)


def _of_tensor_cores(
    key: tuple,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm: Tensor | None,
    otherwise: Launch,
) -> CudaLaunch | None:
    """Return the launch in CUDA C++ that takes the place of another, None where the product is of another form or no
    compiler is here."""
    rows, n_out, width, n_groups, eps, gated, *_ = key
    is_half = x.dtype in (torch.bfloat16, torch.float16)
    if not is_half or width != n_groups * in_cuda.GROUP or not is_ready(x.device):
        return None
    product = in_cuda.Int4Shape(n_out, width, in_cuda.most_rows(rows), gated)
    config, kind = launch_config(product), in_cuda.norm_kind(x, norm, eps)
    macros = in_cuda.macros(
        product,
        config,
        in_bf16=x.dtype == torch.bfloat16,
        norm=kind,
        has_bias=bias is not None,
        has_residual=residual is not None,
    )
    return CudaLaunch(
        "int4_gemv.cu",
        "int4_gemv",
        macros,
        (in_cuda.n_blocks(product, config), 1),
        32 * config.warps,
        in_cuda.shared_bytes(product, config, is_normed=kind != "none"),
        N_TENSORS,
        (n_out, rows, in_cuda.bits_of(eps or 0.0)),
        otherwise,
        early=supports_pdl(x.device),
    )
