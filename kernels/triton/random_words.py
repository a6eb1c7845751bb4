"""Philox 4x32 with seven rounds, as `caramba.ops.philox` defines it."""

from __future__ import annotations

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)


@triton.jit
def random_words(seed, c0, c1, c2, c3):
    """Four words for each counter (c0, c1, c2, c3), uint32 of one shape, keyed by a seed of 64 bits.

    As `tl.philox`, but each product of 32 bits is one instruction that gives both halves, where it takes two.
    """
    seed = tl.core.to_tensor(seed).to(tl.int64)
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        first, third = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c2 = (third >> 32).to(tl.uint32) ^ c1 ^ k0, (first >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = third.to(tl.uint32), first.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3
