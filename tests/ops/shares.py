"""A kernel that writes down which tokens each split of decode attention gets."""

import triton
import triton.language as tl
from caramba.kernels.triton.dba_decode_kernel import share


@triton.jit
def write_shares(out, start, held, length, block_tokens: tl.constexpr, has_tail: tl.constexpr):
    split, n_splits = tl.program_id(0), tl.num_programs(0)
    low, until, first, high = share(start, held, length, split, n_splits, block_tokens, has_tail)
    tl.store(out + split * 4, low)
    tl.store(out + split * 4 + 1, until)
    tl.store(out + split * 4 + 2, first)
    tl.store(out + split * 4 + 3, high)
