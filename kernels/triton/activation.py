"""What `caramba::norm_dropout_activation` does between its norm and its output: dropout and an activation."""

from __future__ import annotations

from caramba.kernels.triton.random_words import random_words

import triton
import triton.language as tl

RELU, GELU = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def drawn_words(row, seed, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The words that dropout draws for rows, uint32 [BLOCK_M, BLOCK_N / 2], as caramba.ops.philox defines them."""
    octet = tl.arange(0, BLOCK_N // 8)[None, :] + tl.zeros([BLOCK_M, BLOCK_N // 8], tl.int32)
    low = (row & 0xFFFFFFFF).to(tl.uint32)[:, None]
    high = (row >> 32).to(tl.uint32)[:, None]
    w0, w1, w2, w3 = random_words(seed, octet.to(tl.uint32), low, high, low * 0)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def kept(words, bound, DROPS: tl.constexpr):
    """Return the dropout mask of random words, [BLOCK_M, BLOCK_N].

    Below `bound`, the bits of a number of float16, are the halves of what is dropped (DROPS) or of what is kept.
    """
    number = tl.core.to_tensor(bound).to(tl.uint16).to(tl.float16, bitcast=True)
    low, high = (words & 0xFFFF).to(tl.uint16), (words >> 16).to(tl.uint16)
    below = tl.interleave(low, high).to(tl.float16, bitcast=True) < number
    return below == 0 if DROPS else below


@triton.jit
def kept_bits(words, bound, DROPS: tl.constexpr):
    """The same as bits of a word, all 16 of a half that is kept; one instruction compares both halves."""
    both = tl.core.to_tensor(bound).to(tl.uint32) * 0x10001
    below = tl.inline_asm_elementwise("set.lt.u32.f16x2 $0, $1, $2;", "=r,r,r", [words, both], tl.uint32, True, 1)
    return ~below if DROPS else below


@triton.jit
def lower_tail(a, DTYPE: tl.constexpr):
    """P(Z < -a) of a standard normal Z for a >= 0, as exactly as an output of DTYPE shows.

    2^q(a) with a polynomial of least relative error on [0, 5.5]: 2.5e-4 for bf16 and 5.4e-6 for fp16, an eighth and a
    45th of half a unit in the last place. Beyond, both fall on from 2e-8.
    """
    if DTYPE == tl.bfloat16:
        q = -0.000233252285 * a + 0.00486980518
        q = q * a - 0.044599276
        q = q * a - 0.46968025
        q = q * a - 1.14626181
        tail = tl.exp2(q * a - 1.0003587)
    elif DTYPE == tl.float16:
        q = -1.79341635e-06 * a + 6.09033523e-05
        q = q * a - 0.000926022185
        q = q * a + 0.00849372894
        q = q * a - 0.0539377816
        q = q * a - 0.458480567
        q = q * a - 1.15124679
        tail = tl.exp2(q * a - 0.99999547)
    else:
        tail = 0.5 - 0.5 * tl.erf(a * 0.7071067811865476)
    return tail


@triton.jit
def activated(x, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """The activation, for an output of DTYPE."""
    if ACTIVATION == RELU:
        y = tl.where(x <= 0, 0.0, x)
    elif ACTIVATION == GELU:
        a = tl.abs(x)
        y = tl.where(x <= 0, 0.0, x) - a * lower_tail(a, DTYPE)
    else:
        y = x / (1.0 + tl.exp(-x))
    return y


@triton.jit
def slope(x, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    """The activation's derivative; that of relu at 0 is 0."""
    if ACTIVATION == RELU:
        y = tl.where(x > 0, 1.0, 0.0)
    elif ACTIVATION == GELU:
        tail = lower_tail(tl.abs(x), DTYPE)
        # exp(-x^2 / 2) / sqrt(2 pi)
        density = tl.exp2(x * x * -0.7213475204444817 - 1.3257480647361595)
        y = tl.where(x > 0, 1.0 - tail, tail) + x * density
    else:
        share = 1.0 / (1.0 + tl.exp(-x))
        y = share * (1.0 + x * (1.0 - share))
    return y
