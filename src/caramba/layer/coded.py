"""Linear layers whose weights are codes of 8 bits with a scale of each row: half the bytes of a decode step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from caramba.layer.few_rows import is_few
from caramba.ops import row_linear, rows_fit

UNIT = 2.0**7
"""Codes are over this, exactly, where float16 would not hold their sums as they are."""


class CodedLinear(nn.Module):
    """Linear map y_n = s_n sum_k q_nk x_k + b_n of codes q, for inference.

    Few rows on a device with a kernel for them read each code once, in the dtype of x; more rows take the library's
    product of a weight made for it. `reduce` comes before, as in `LinearLayer`.

    Shape: `weight` int8 [N, K], `scale` fp32 [N], bias [N] or None; [..., K] to [..., N] in x's dtype.

    Reference: Dettmers et al., 2022, arXiv:2208.07339 (codes by row).
    """

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.scale = nn.Parameter(scale.detach(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.reduce = reduce

    def forward(self, input: Tensor, context: object = None) -> Tensor:
        """Return the map of `input`. `context` is what the layer that this one stands for is given beside it: a head
        the embedding, a node of a topology its caches; it reads none of them."""
        x = input if self.reduce is None else self.reduce(input)
        if is_few(x) and rows_fit(x, self.weight):
            return row_linear(x, self.weight, self.bias, scale=self.scale)
        return linear(x, self.weight, self.bias, self.scale)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    """Return W x + b, W being a weight or, with a scale, codes. Shape: x [..., K], weight [N, K] to [..., N]."""
    if scale is None:
        return F.linear(x, weight, bias)
    operand = weight.to(x.dtype)
    if x.dtype == torch.float16:
        operand, scale = operand / UNIT, scale * UNIT
    y = F.linear(x, operand) * scale
    return (y if bias is None else y + bias).to(x.dtype)
