"""Packed INT4 weights, and the op `caramba::dequantize_int4`, which dequantises them.

An int16 word packs four 4-bit codes. A group of inputs shares a scale and a zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import caramba_op, direct

WORDS = torch.int16
FIELDS = 4
"""Codes of a word."""
SHARED = torch.bfloat16
"""Dtype of the scale and the zero of a group."""


def pack_int4(codes: Tensor, group: int) -> Tensor:
    """Pack codes 0 to 15 into words of four.

    Word j of a group has at bits 4f the code of its feature f G / 4 + j. Codes at the same bits of neighbouring words
    are neighbouring features, so that a mask yields pairs and kernels need no shuffle.

    Shape: [N, K], K a multiple of the group G and G of 4, to int16 [N, K / 4].
    """
    fields = codes.to(torch.int32).unflatten(1, (-1, FIELDS, group // FIELDS))
    words = fields[:, :, 0] | fields[:, :, 1] << 4 | fields[:, :, 2] << 8 | fields[:, :, 3] << 12
    return words.to(WORDS).flatten(1).contiguous()


def dequantize_int4(words: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight q s + z of packed codes, rounded once.

    Shape: words int16 [N, K / 4], scale bfloat16 [N, K / G, 2] of a scale and a zero each, to [N, K].

    Raises:
        ConfigError: shapes or dtypes that do not fit.
    """
    n_groups = scale.shape[1] if scale.dim() == 3 else 0
    fits = words.dtype == WORDS and words.dim() == 2 and n_groups > 0 and words.shape[1] % n_groups == 0
    if not fits or scale.dtype != SHARED or tuple(scale.shape) != (words.shape[0], n_groups, 2):
        raise ConfigError(
            f"dequantize_int4: got {words.dtype} {tuple(words.shape)} and {scale.dtype} {tuple(scale.shape)}, "
            f"expected {WORDS} [N, K / 4] and {SHARED} [N, K / G, 2]"
        )
    run = direct("dequantize_int4", words, scale) or torch.ops.caramba.dequantize_int4.default
    return run(words, scale, dtype)


@caramba_op(
    "dequantize_int4",
    fake=lambda words, scale, dtype: scale.new_empty((words.shape[0], words.shape[1] * FIELDS), dtype=dtype),
)
def reference_dequantize_int4(words: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the op in plain PyTorch."""
    n_rows, n_groups = scale.shape[:2]
    step, zero = scale.to(dtype)[..., None].unbind(2)
    y = torch.empty((n_rows, n_groups, FIELDS, words.shape[1] // n_groups), dtype=dtype, device=words.device)
    for field in range(FIELDS):
        # The sign comes along, and is masked. One field at a time takes half as long on a CPU as all together.
        codes = (words >> 4 * field).bitwise_and_(15).to(dtype).view(n_rows, n_groups, -1)
        torch.addcmul(zero, codes, step, out=y[:, :, field])
    return y.flatten(1)


def int4_matmul(x: Tensor, words: Tensor, scale: Tensor) -> Tensor:
    """Return W x for a few rows x without dequantising the weight.

    It multiplies codes by x group by group, and adds the zeros by the sums of x. On a CPU it takes a quarter to two
    thirds of the time of the dequantised product. Sums are in at least fp32, those within a group in bfloat16 where x
    is bfloat16.

    Shape: x [..., K], words int16 [N, K / 4], scale bfloat16 [N, K / G, 2], to [..., N] in x's dtype.
    """
    n_rows, n_groups = scale.shape[:2]
    rows = x.reshape(-1, x.shape[-1])
    rows = (
        rows.float() if x.dtype == torch.float16 else rows
    )  # whose range is less than that of sums of codes
    places = rows.view(len(rows), n_groups, 2, 2, -1)  # byte of a word, half of it, word
    wide, sums = torch.promote_types(rows.dtype, torch.float32), None
    pairs = words.view(torch.uint8)
    for half, codes in enumerate((pairs & 15, pairs >> 4)):
        at = places[:, :, :, half].transpose(2, 3).flatten(2).permute(1, 2, 0)
        found = torch.bmm(codes.to(rows.dtype).view(n_rows, n_groups, -1).transpose(0, 1), at).to(wide)
        sums = found if sums is None else sums + found  # [groups, N, rows]
    assert sums is not None
    step, zero = scale.to(wide).unbind(2)
    y = (sums * step.t()[:, :, None]).sum(0).t()
    y = (y + places.to(wide).sum((2, 3, 4)) @ zero.t()).to(x.dtype)
    return y.contiguous().view(*x.shape[:-1], n_rows)
