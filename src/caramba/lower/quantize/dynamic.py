"""Products of 8-bit activations, quantised as they come, and 8-bit weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from caramba.ops.backend import upcast

MOST, MOST_REDUCED = 127, 63
"""Largest code; on CPUs that add pairs of products in 16 bits half of it, so that no pair overflows."""
FEWEST_ROWS = 32
"""CUDA's 8-bit product takes more than 16 rows; fewer are filled up with zeros."""
TINY = 1e-12


class DynamicLinear(nn.Module):
    """Linear map of codes: y_to = s_t s_o sum_j q_tj w_oj + b_o, with q_tj = round(x_tj / (c_j s_t)).

    Every token has a symmetric scale of its own, s_t = max_j |x_tj / c_j| / 127, and every output channel one, s_o;
    `smoothing` c moves ranges from activations to weights, whose codes hold w_oj c_j. Sums are exact, in int32.

    Shape: codes int8 [N, K], scale fp32 [N], smoothing [K] or None; forward [..., K] to [..., N] in its input's dtype.

    Reference: Xiao et al., 2022, arXiv:2211.10438.
    """

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor,
        smoothing: Tensor | None,
        bias: Tensor | None,
        *,
        reduce: Callable[[Tensor], Tensor] | None = None,
        is_reduced: bool = False,
    ) -> None:
        super().__init__()
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("inverse", None if smoothing is None else 1 / smoothing)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.reduce, self.most = reduce, MOST_REDUCED if is_reduced else MOST

    codes: Tensor
    scale: Tensor
    inverse: Tensor | None

    def forward(self, input: Tensor, token_weight: Tensor | None = None) -> Tensor:
        x = input if self.reduce is None else self.reduce(input)
        rows = upcast(x).flatten(0, -2)
        rows = rows if self.inverse is None else rows * self.inverse
        step = rows.abs().amax(-1, keepdim=True).clamp(min=TINY) / self.most
        q = (rows / step).round().to(torch.int8)
        n_rows = len(q)
        if q.is_cuda and n_rows < FEWEST_ROWS:
            q = F.pad(q, (0, 0, 0, FEWEST_ROWS - n_rows))
        sums = torch.ops.aten._int_mm(q, self.codes.t())[:n_rows]
        y = sums * step * self.scale
        y = y if self.bias is None else y + self.bias
        return y.to(x.dtype).unflatten(0, x.shape[:-1])
