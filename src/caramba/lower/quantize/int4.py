"""int4 weight quantisation: asymmetric, one scale and zero for each group of inputs."""

import torch
from torch import Tensor

from caramba.ops.backend import upcast
from caramba.ops.small_batch_linear import pack_int4

GROUP_SIZES = (128, 64, 32)
"""Inputs that share a scale and a zero; the largest that divides a layer's."""
MOST_CODE = 15
LEAST_STEP = 2.0**-100
AT_A_TIME = 2**24
"""Weight elements quantised at once: temporaries take some 50 bytes each."""


def group_of(width: int) -> int | None:
    """Return the largest group size that divides a width, or None."""
    return next((size for size in GROUP_SIZES if width % size == 0), None)


def quantize_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return packed codes q, scales s and zeros z of a weight w = q s + z.

    s is a fifteenth of the group's range and z its minimum. Both are rounded to bfloat16 before codes are chosen, so
    that q is the nearest code for the values used later. (torchao's z is the value of code 8. The minimum is itself a
    weight, exact in bfloat16 for bfloat16 weights, and s q + z needs no subtraction.)

    Shape: weight [N, K] to int16 [N, K / 4] and bfloat16 [N, K / group, 2].
    """
    words, scales = [], []
    for rows in weight.detach().split(max(1, AT_A_TIME // weight.shape[1])):
        grouped = upcast(rows).unflatten(1, (-1, group))
        low, high = grouped.aminmax(dim=2)
        scale = torch.stack([((high - low) / MOST_CODE).clamp(min=LEAST_STEP), low], dim=2).bfloat16()
        step, zero = scale.to(grouped.dtype)[..., None].unbind(2)
        codes = ((grouped - zero) / step).round_().clamp_(0, MOST_CODE)
        words.append(pack_int4(codes.flatten(1), group))
        scales.append(scale)
    return torch.cat(words), torch.cat(scales)
