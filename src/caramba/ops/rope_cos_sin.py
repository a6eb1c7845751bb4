"""The op `caramba::rope_cos_sin`: RoPE cosines and sines of a decode step's positions, for all layers' frequencies."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import call_op, caramba_op


def rope_cos_sin(offset: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of every position times every frequency, in float32, without gradients.

    One launch per step computes them for all layers; a compiled graph would compute them again at every use.

    Shape: offset [B, T] integers, frequencies [N, G, P] float32, to [N, B, G, T, P] twice.

    Raises:
        ConfigError: positions that are not integers [B, T], or frequencies that are not float32 [N, G, P].
    """
    if offset.dim() != 2 or offset.dtype not in (torch.int32, torch.int64):
        raise ConfigError(
            f"rope_cos_sin: offset is {offset.dtype} of shape {tuple(offset.shape)}, expected int32 or int64 [B, T]"
        )
    fits = frequencies.dim() == 3 and frequencies.dtype == torch.float32
    if not fits or frequencies.device != offset.device:
        raise ConfigError(
            f"rope_cos_sin: frequencies are {frequencies.dtype} {tuple(frequencies.shape)} on {frequencies.device}, "
            f"expected float32 [N, G, P] on {offset.device}"
        )
    return call_op("rope_cos_sin", offset, frequencies)


def _fake(offset: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    n, groups, pairs = frequencies.shape
    shape = (n, offset.shape[0], groups, offset.shape[1], pairs)
    return frequencies.new_empty(shape), frequencies.new_empty(shape)


@caramba_op("rope_cos_sin", fake=_fake)
def reference_rope_cos_sin(offset: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the op in plain PyTorch."""
    angles = offset.to(torch.float32)[None, :, None, :, None] * frequencies[:, None, :, None, :]
    return angles.cos(), angles.sin()
