"""Codes of 4 bits of a weight: in groups of inputs, from the smallest of a group up in fifteen steps."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.ops import pack_int4
from caramba.ops.upcast import upcast

GROUP_SIZES = (128, 64, 32)
"""Inputs that share a scale and a zero; the largest that divides a layer's."""
MOST = 15
SMALLEST = 2.0**-100
AT_A_TIME = 2**24
"""Numbers of a weight that are looked at together: what is made on the way takes some 50 bytes of each."""


def group_of(width: int) -> int | None:
    """Return how many inputs of a width share a scale, None where no group divides it."""
    return next((size for size in GROUP_SIZES if width % size == 0), None)


def quantize_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return codes q, as words, and a scale s and a zero z of each group: w is q s + z.

    s is a fifteenth of the group's range and z its smallest number, both rounded before codes are chosen, so that q is
    the nearest code to what is multiplied later. (torchao's z is the number of code 8; the smallest is a weight itself,
    which bfloat16 holds exactly where weights are of it, and s q + z needs no subtraction.)

    Shape: weight [N, K] to int16 [N, K / 4] and bfloat16 [N, K / group, 2].
    """
    words, scales = [], []
    for rows in weight.detach().split(max(1, AT_A_TIME // weight.shape[1])):
        grouped = upcast(rows).unflatten(1, (-1, group))
        low, high = grouped.aminmax(dim=2)
        scale = torch.stack([((high - low) / MOST).clamp(min=SMALLEST), low], dim=2).bfloat16()
        step, zero = scale.to(grouped.dtype)[..., None].unbind(2)
        codes = ((grouped - zero) / step).round_().clamp_(0, MOST)
        words.append(pack_int4(codes.flatten(1), group))
        scales.append(scale)
    return torch.cat(words), torch.cat(scales)
