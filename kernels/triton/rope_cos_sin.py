"""Kernel and launcher of `caramba::rope_cos_sin`."""

from __future__ import annotations

from caramba.kernels.triton.launch import Launches
from torch import Tensor

import triton
import triton.language as tl

BLOCK = 256


@triton.jit
def _angles_kernel(
    offset_ptr, frequency_ptr, cos_ptr, sin_ptr, n_all, batch, groups, n_tokens, pairs, BLOCK_A: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * BLOCK_A + tl.arange(0, BLOCK_A)
    inside = at < n_all
    pair, rest = at % pairs, at // pairs
    token, rest = rest % n_tokens, rest // n_tokens
    group, rest = rest % groups, rest // groups
    row, layer = rest % batch, rest // batch
    offset = tl.load(offset_ptr + row * n_tokens + token, inside, other=0)
    frequency = tl.load(frequency_ptr + (layer * groups + group) * pairs + pair, inside, other=0.0)
    angle = offset.to(tl.float32) * frequency
    tl.store(cos_ptr + at, tl.cos(angle), inside)
    tl.store(sin_ptr + at, tl.sin(angle), inside)


_launches = Launches(_angles_kernel)


def rope_cos_sin(offset: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    n, groups, pairs = frequencies.shape
    batch, n_tokens = offset.shape
    shape = (n, batch, groups, n_tokens, pairs)
    cos, sin = frequencies.new_empty(shape), frequencies.new_empty(shape)
    n_all = cos.numel()
    if not n_all:
        return cos, sin
    offset, frequencies = offset.contiguous(), frequencies.contiguous()
    key = (shape, offset.dtype, offset.get_device())
    launch = _launches.get(key)
    if launch is None:
        scalars = (n_all, batch, groups, n_tokens, pairs)
        launch = _launches.add(key, (-(-n_all // BLOCK),), scalars, BLOCK, num_warps=4)
    launch(offset, frequencies, cos, sin)
    return cos, sin
