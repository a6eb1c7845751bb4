"""Kernel and launcher of `per_head_linear`, with the tiles of `absorbed_queries`."""

from __future__ import annotations

from caramba.kernels.triton.absorbed_queries import loaded, power_of_2, rows_of
from caramba.kernels.triton.launch import Launches
from caramba.kernels.triton.signature import tensor_signature
from torch import Tensor

import triton
import triton.language as tl

VALUE_COLUMNS = 32
"""Columns of a program: of a layer of 32 heads with values of 64 features these make 64 programs."""
INNER = 128
"""Features that a product takes at a time."""


@triton.jit
def _values_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    x_batch,
    x_token,
    x_head,
    n_rows,
    n_tokens,
    n_heads,
    R: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    head, part = tl.program_id(0) % n_heads, tl.program_id(0) // n_heads
    row = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = row < n_rows
    batch, token = row // n_tokens, row % n_tokens
    column = part * BLOCK_N + tl.arange(0, BLOCK_N)
    x_at = batch.to(tl.int64) * x_batch + token.to(tl.int64) * x_token + head.to(tl.int64) * x_head
    out = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for start in tl.static_range(0, R, BLOCK_R):
        feature = start + tl.arange(0, BLOCK_R)
        x = loaded(x_ptr, x_at, inside, feature, R)
        weight = loaded(weight_ptr + head * (R * D), feature * D, feature < R, column, D)
        # Of float32, which `dba_decode_up` may pass, products would be made in tf32 otherwise.
        out = tl.dot(x, weight.to(DTYPE), out, input_precision="ieee")
    y_at = (row.to(tl.int64) * n_heads + head) * D
    mask = inside[:, None] & (column < D)[None, :]
    tl.store(y_ptr + y_at[:, None] + column[None, :], out.to(DTYPE), mask=mask)


_values = Launches(_values_kernel)


def per_head_linear(x: Tensor, weight: Tensor) -> Tensor:
    batch, n_tokens, heads, latent = x.shape
    width = weight.shape[-1]
    y = x.new_empty((batch, n_tokens, heads, width))
    if y.numel() == 0:
        return y
    x, weight = x if x.stride(-1) == 1 else x.contiguous(), weight.contiguous()
    key = (tensor_signature(x), weight.dtype, width)
    launch = _values.get(key)
    if launch is None:
        rows, block_t = batch * n_tokens, rows_of(batch * n_tokens)
        launch = _values.add(
            key,
            (heads * -(-width // VALUE_COLUMNS), -(-rows // block_t)),
            (*x.stride()[:3], rows, n_tokens, heads),
            *(latent, width, block_t, min(power_of_2(latent), INNER), VALUE_COLUMNS),
            num_warps=4,
        )
    launch(x, weight, y)
    return y
