"""Rotary position embedding with explicit frequencies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from caramba.config.layer import RopeScalingConfig
from caramba.errors import ConfigError


def rope_frequencies(width: int, base: float, scaling: RopeScalingConfig | None = None) -> Tensor:
    """Return the rotary frequencies base^(-2p/width), rescaled, as [width / 2] float32 on the CPU.

    `linear` divides all by `factor`. `llama3` divides those of wavelength above original / low_freq_factor,
    keeps those below original / high_freq_factor, and between the two interpolates linearly in original /
    wavelength.

    Raises:
        ConfigError: a scaling that is not built yet.

    Reference: Su et al., 2021, arXiv:2104.09864; Grattafiori et al., 2024, arXiv:2407.21783. Computed in
    float32, as the checkpoints that use it were trained.
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width
    frequencies = 1.0 / (base**exponents)
    if scaling is None:
        return frequencies
    if scaling.type == "linear":
        return frequencies / scaling.factor
    if scaling.type == "llama3":
        turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor
    raise ConfigError(
        f"rope_scaling: type={scaling.type} comes with the model substrate work; use llama3 or linear"
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pair p, made of features p and p + D/2, by its angle: the rotate-half convention.

    Shape: x [B, N, T, D], cos and sin [N or 1, T, D/2]; returns [B, N, T, D] in at least float32.
    """
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class RotaryEmbedding(nn.Module):
    """Angles of rotary positions, from frequencies held in a buffer `inv_freq` [G, D/2], one row per head
    group.

    The buffer stays float32 whatever the module is cast to, because half precision cannot hold an angle, and
    it is real even in a model built on the meta device. `explicit` puts it into the state dict: surgery
    chooses the frequencies of decoupled attention per key/value head, so they are part of the weights there.
    """

    inv_freq: Tensor

    def __init__(
        self,
        width: int,
        base: float,
        scaling: RopeScalingConfig | None = None,
        *,
        n_groups: int = 1,
        explicit: bool = False,
    ) -> None:
        super().__init__()
        frequencies = rope_frequencies(width, base, scaling).expand(n_groups, -1).clone()
        self.register_buffer("inv_freq", frequencies, persistent=explicit)

    def forward(self, offset: int, n_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the angles at positions offset to offset + T - 1, each [G, T, D/2]
        float32."""
        positions = torch.arange(offset, offset + n_tokens, dtype=torch.float32, device=device)
        angles = positions[:, None] * self.inv_freq.to(device)[:, None, :]
        return angles.cos(), angles.sin()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        source = self.inv_freq
        super()._apply(fn, recurse)
        # Follow the device that `fn` chose, never its dtype; and never lose the values to `to("meta")` or
        # `to_empty`.
        target = source.device if self.inv_freq.is_meta else self.inv_freq.device
        self.inv_freq = source.to(target)
        return self

    def extra_repr(self) -> str:
        groups, pairs = self.inv_freq.shape
        return f"{groups} x {pairs} frequencies"
