"""A kernel that writes down which tokens each split of decode attention gets."""

import triton
import triton.language as tl
from caramba.kernels.triton.dba_decode_kernel import share


@triton.jit
def write_shares(
    out, start, held, length, n_splits, most: tl.constexpr, block_tokens: tl.constexpr, has_tail: tl.constexpr
):
    """One program has all splits beside each other: in the interpreter a program takes as long for one."""
    split = tl.arange(0, most)
    low, until, first, high = share(start, held, length, split, n_splits, block_tokens, has_tail)
    at, is_one = out + split * 4, split < n_splits
    tl.store(at, low, mask=is_one)
    tl.store(at + 1, until, mask=is_one)
    tl.store(at + 2, first, mask=is_one)
    tl.store(at + 3, high, mask=is_one)
