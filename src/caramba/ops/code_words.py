"""Codes of 4 bits as they lie in memory, words of four in groups of inputs that share a scale and a zero, and the op
`caramba::numbers_of_words`, which makes the weight of them."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import direct

WORDS = torch.int16
FIELDS = 4
"""Codes of a word."""
SHARED = torch.bfloat16
"""Dtype of the scale and the zero of a group."""


def packed(codes: Tensor, group: int) -> Tensor:
    """Return codes of 0 to 15 as words.

    Word j of a group holds at bits 4f the code of its feature f G / 4 + j: the codes at one place of neighbouring words
    are neighbours too, so that a mask makes pairs of them and no kernel shuffles.

    Shape: [N, K], K a multiple of the group G and G of 4, to int16 [N, K / 4].
    """
    fields = codes.to(torch.int32).unflatten(1, (-1, FIELDS, group // FIELDS))
    words = fields[:, :, 0] | fields[:, :, 1] << 4 | fields[:, :, 2] << 8 | fields[:, :, 3] << 12
    return words.to(WORDS).flatten(1).contiguous()


torch.library.define("caramba::numbers_of_words", "(Tensor words, Tensor scale, ScalarType dtype) -> Tensor")


def numbers_of_words(words: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight that words stand for, q s + z rounded once.

    Shape: words int16 [N, K / 4], scale bfloat16 [N, K / G, 2] of a scale and a zero each, to [N, K].

    Raises:
        ConfigError: shapes or dtypes that do not fit.
    """
    n_groups = scale.shape[1] if scale.dim() == 3 else 0
    fits = words.dtype == WORDS and words.dim() == 2 and n_groups > 0 and words.shape[1] % n_groups == 0
    if not fits or scale.dtype != SHARED or tuple(scale.shape) != (words.shape[0], n_groups, 2):
        raise ConfigError(
            f"numbers_of_words: got {words.dtype} {tuple(words.shape)} and {scale.dtype} {tuple(scale.shape)}, "
            f"expected {WORDS} [N, K / 4] and {SHARED} [N, K / G, 2]"
        )
    run = direct("numbers_of_words", words, scale) or torch.ops.caramba.numbers_of_words.default
    return run(words, scale, dtype)


def reference_numbers_of_words(words: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the op in plain PyTorch."""
    n_groups = scale.shape[1]
    by = torch.arange(0, 4 * FIELDS, 4, dtype=WORDS, device=words.device)[:, None]
    fields = words.unflatten(1, (n_groups, 1, -1)) >> by  # the sign comes along, and is masked
    step, zero = scale.to(dtype)[..., None, None].unbind(2)
    return torch.addcmul(zero, fields.bitwise_and_(15).to(dtype), step).flatten(1)


torch.library.impl("caramba::numbers_of_words", "CompositeExplicitAutograd", reference_numbers_of_words)


@torch.library.register_fake("caramba::numbers_of_words")
def _(words: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return scale.new_empty((words.shape[0], words.shape[1] * FIELDS), dtype=dtype)
