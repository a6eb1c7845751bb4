"""Kernel and launcher of `caramba::store_sample`."""

from __future__ import annotations

from caramba.kernels.triton.launch import Launches
from torch import Tensor

import triton
import triton.language as tl


@triton.jit
def _keep_kernel(
    token_ptr, logprob_ptr, step_ptr, tokens_ptr, logprobs_ptr, fed_ptr, n_rows, n_columns, BLOCK_B: tl.constexpr
):  # fmt: skip
    # One program, of one warp: all rows read the count before it is changed.
    step = tl.load(step_ptr)
    row = tl.arange(0, BLOCK_B)
    inside = row < n_rows
    token = tl.load(token_ptr + row, inside, other=0)
    logprob = tl.load(logprob_ptr + row, inside, other=0.0)
    at = row.to(tl.int64) * n_columns + tl.minimum(step, n_columns - 1)
    tl.store(tokens_ptr + at, token, inside)
    tl.store(logprobs_ptr + at, logprob, inside)
    tl.store(fed_ptr + row, token, inside)
    tl.store(step_ptr, step + 1)


_launches = Launches(_keep_kernel)


def store_sample(token: Tensor, logprob: Tensor, step: Tensor, tokens: Tensor, logprobs: Tensor, fed: Tensor) -> None:
    n_rows, n_columns = tokens.shape
    if not n_rows:
        step += 1
        return
    key = (n_rows, n_columns, token.get_device())
    launch = _launches.get(key)
    if launch is None:
        block = 1 << (n_rows - 1).bit_length()
        launch = _launches.add(key, (1,), (n_rows, n_columns), block, num_warps=1)
    launch(token, logprob, step, tokens, logprobs, fed)
