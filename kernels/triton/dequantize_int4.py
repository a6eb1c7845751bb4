"""Kernel and launcher of `caramba::dequantize_int4`: the weight of codes of 4 bits, in one pass."""

from __future__ import annotations

import torch
from caramba.kernels.triton.launch import Launches
from torch import Tensor

import triton
import triton.language as tl

BLOCK_J, WARPS = 1024, 4
"""Words of a program, and its warps."""


@triton.jit
def _numbers_kernel(words_ptr, scale_ptr, y_ptr, n_words, BLOCK: tl.constexpr, BLOCK_J: tl.constexpr):
    """Make the numbers of words of one row; BLOCK of them are a group."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    inside = j < n_words
    word = tl.load(words_ptr + row * n_words + j, mask=inside, other=0).to(tl.int32)
    at = scale_ptr + (row * (n_words // BLOCK) + j // BLOCK) * 2
    step = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    zero = tl.load(at + 1, mask=inside, other=0.0).to(tl.float32)
    to = y_ptr + row * n_words * 4 + j // BLOCK * BLOCK * 4 + j % BLOCK
    for field in tl.static_range(4):
        number = ((word >> (4 * field)) & 15).to(tl.float32) * step + zero
        tl.store(to + field * BLOCK, number.to(y_ptr.dtype.element_ty), mask=inside)


_launches = Launches(_numbers_kernel)


def dequantize_int4(words: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    n_rows, n_words = words.shape
    y = words.new_empty((n_rows, 4 * n_words), dtype=dtype)
    if not y.numel():
        return y
    key = (n_rows, n_words, scale.shape[1], dtype, words.get_device())
    launch = _launches.get(key)
    if launch is None:
        launch = _launches.add(
            *(key, (n_rows, -(-n_words // BLOCK_J)), (n_words,)),
            *(n_words // scale.shape[1], BLOCK_J),
            num_warps=WARPS,
        )
    launch(words.contiguous(), scale.contiguous(), y)
    return y
