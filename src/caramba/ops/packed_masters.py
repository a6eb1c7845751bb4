"""Float32 master weights whose lower bits are packed into the last bits of the two AdamW moments.

A float32 has 16 bits more than a bfloat16. The 11 last of the first moment's 23 and the 5 last of the second's are
these, so that float32 masters take no memory besides bfloat16 weights and their moments. A moment's error is half a
unit of its remaining bits: at most 2^-13 of the first and 2^-19 of the second. That is far below the share by which a
step changes them, 1 - beta, for any beta1 to 0.99 and beta2 to 0.9999. Moments read without unpacking have at most
three times that error.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST_BITS, SECOND_BITS = 11, 5
"""Of the first and of the second moment: a tenth of one changes in a step, and a thousandth or more of the other."""


def unpack_masters(weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> Tensor:
    """Return the float32 masters of bfloat16 weights. Zero moments, as of a new optimiser, add no bits.

    Shape: one shape; weight bfloat16, or float32 that is rounded first; moments float32.
    """
    first = exp_avg.view(torch.int32).bitwise_and((1 << FIRST_BITS) - 1)
    second = exp_avg_sq.view(torch.int32).bitwise_and((1 << SECOND_BITS) - 1)
    rest = first.bitwise_left_shift_(SECOND_BITS).bitwise_or_(second)
    # Of the nearest bfloat16 the rest is up or down: from half a unit on the weight was rounded up.
    rest = rest.bitwise_xor_(1 << 15).sub_(1 << 15)
    return _nearest(weight.float()).view(torch.int32).add(rest).view(torch.float32)


def moments_of(exp_avg: Tensor, exp_avg_sq: Tensor) -> tuple[Tensor, Tensor]:
    """Return the moments without the bits of the masters."""
    return _cleared(exp_avg, FIRST_BITS), _cleared(exp_avg_sq, SECOND_BITS)


def pack_masters(master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return bfloat16 weights of float32 masters, and the moments with the masters' lower bits.

    Rounds to nearest, halves away from zero.
    """
    rest = master.view(torch.int32).bitwise_and(0xFFFF)
    first = _rounded(exp_avg, FIRST_BITS).view(torch.int32)
    second = _rounded(exp_avg_sq, SECOND_BITS).view(torch.int32)
    return (
        _nearest(master).to(torch.bfloat16),
        first.bitwise_or(rest.bitwise_right_shift(SECOND_BITS)).view(torch.float32),
        second.bitwise_or(rest.bitwise_and((1 << SECOND_BITS) - 1)).view(torch.float32),
    )


def _nearest(x: Tensor) -> Tensor:
    """float32 with no more bits than bfloat16 has, halves away from zero: the rest then fits 16 bits with its sign."""
    return _rounded(x, 16)


def _rounded(x: Tensor, bits: int) -> Tensor:
    """x to the nearest float32 whose last `bits` are zero; NaN stays, which would carry over into the sign."""
    half = x.view(torch.int32).add(1 << (bits - 1)).view(torch.float32)
    return _cleared(torch.where(x.isnan(), x, half), bits)


def _cleared(x: Tensor, bits: int) -> Tensor:
    return x.view(torch.int32).bitwise_and(-(1 << bits)).view(torch.float32)
