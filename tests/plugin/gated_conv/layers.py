"""The torch modules; each takes its schema object."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GatedConv(nn.Module):
    """Shape: [B, T, M] to [B, T, M]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        m, self.kernel = config.d_model, config.kernel
        self.gate = nn.Linear(m, m, bias=False)
        self.conv = nn.Conv1d(m, m, self.kernel, groups=m, bias=False)

    def forward(self, x: Tensor, ctx: Any = None) -> Tensor:
        seen = x
        if ctx is not None:  # behind a cache: the tokens before these come first
            seen = ctx.next_cache().append({"x": x[:, None]})["x"][:, 0].to(x.dtype)
        last = F.pad(seen, (0, 0, self.kernel - 1, 0))[:, -(x.shape[1] + self.kernel - 1) :]
        return F.silu(self.gate(x)) * self.conv(last.transpose(1, 2)).transpose(1, 2)


class Scaled(nn.Module):
    """Shape: [B, T, M] to [B, T, M]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(config.d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor, ctx: Any = None) -> Tensor:
        return x * self.scale
