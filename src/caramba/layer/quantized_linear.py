"""Linear layers whose weights are codes of 8 or 4 bits: half or a quarter of the bytes of a decode step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from caramba.layer.small_batch import is_small_batch
from caramba.ops import WORDS, dequantize_int4, int4_matmul, rows_fit, small_batch_linear

UNIT = 2.0**7
"""Codes over this, and scales times it, are of the size of weights and what float16 holds best."""

FEW_ON_CPU = 4
"""Rows up to which a CPU makes no weight of codes of 4 bits."""


class QuantizedLinear(nn.Module):
    """Linear map y_n = s_n sum_k q_nk x_k + b_n of codes q, for inference; of 4 bits, with a scale and a zero of each
    group g of inputs, sum_k (q_nk s_ng + z_ng) x_k + b_n.

    Few rows on a device with a kernel for them read each code once, in the dtype of x; more rows take the library's
    product of a weight made for it. `reduce` comes before, as in `LinearLayer`.

    Shape: `weight` int8 [N, K], `scale` fp32 [N], bias [N] or None; [..., K] to [..., N] in x's dtype. Of 4 bits
    `weight` is int16 [N, K / 4], words as `packed` makes them, and `scale` bfloat16 [N, K / G, 2].

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
        return linear(x, self.weight, self.bias, self.scale)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        """Move, as any module; of another dtype is the bias alone, since kernels read scales as they are."""
        exact = self.scale.data
        super()._apply(fn, recurse)
        if self.scale.dtype != exact.dtype:
            self.scale.data = exact.to(self.scale.device)
        return self


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    """Return W x + b, W being a weight or, with a scale, codes, of which few rows make no weight.

    Shape: x [..., K], weight [N, K], of words [N, K / 4], to [..., N].
    """
    if scale is None:
        return F.linear(x, weight, bias)
    if is_small_batch(x) and rows_fit(x, weight):
        return small_batch_linear(x, weight, bias, scale=scale)
    if weight.dtype == WORDS:
        if x.is_cpu and 0 < x.numel() <= FEW_ON_CPU * x.shape[-1]:
            y = int4_matmul(x, weight, scale)
            return y if bias is None else y + bias
        return F.linear(x, dequantize_int4(weight, scale, x.dtype), bias)
    operand = weight.to(x.dtype)  # a copy, of which there should be one
    if x.dtype == torch.float16:  # which holds the sums of weights where those of codes are beyond it
        return F.linear(x, operand.mul_(1 / UNIT).mul_((scale[:, None] * UNIT).half()), bias)
    y = F.linear(x, operand) * scale
    return (y if bias is None else y + bias).to(x.dtype)
