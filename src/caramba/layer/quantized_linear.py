"""Weight-only quantised linear layers (int8, int4): a half or a quarter of the weight bytes of a decode step."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from caramba.ops.small_batch_linear import (
    WORDS,
    dequantize_int4,
    int4_matmul,
    is_small_batch,
    rows_fit,
    small_batch_linear,
)

UNIT = 2.0**7
"""Codes are divided and scales multiplied by this, so that float16 represents both well."""

FEW_ON_CPU = 4
"""Maximum rows for which a CPU multiplies int4 codes without dequantising the whole weight."""


class QuantizedLinear(nn.Module):
    """Linear layer with int8 or int4 weights, for inference only.

    int8: y_n = s_n sum_k q_nk x_k + b_n for codes q. int4: y_n = sum_k (q_nk s_ng + z_ng) x_k + b_n with a scale and
    a zero for each group g of inputs. A small batch on a device with a kernel reads each code once, in the dtype of x;
    larger batches dequantise the weight and call the library's GEMM. `reduce` is applied first, as in `LinearLayer`.

    Shape: `weight` int8 [N, K], `scale` fp32 [N], bias [N] or None; [..., K] to [..., N] in x's dtype. For int4
    `weight` is int16 [N, K / 4], as packed by `pack_int4`, and `scale` bfloat16 [N, K / G, 2].

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
        """Return the output for `input`; `context` is ignored.

        The replaced layer may be called with a second argument: a head with the embedding, a topology node with caches.
        """
        x = input if self.reduce is None else self.reduce(input)
        return linear(x, self.weight, self.bias, self.scale)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedLinear":
        """Move or cast like any module, but never cast the scales, whose dtype the kernels require."""
        exact = self.scale.data
        super()._apply(fn, recurse)
        if self.scale.dtype != exact.dtype:
            self.scale.data = exact.to(self.scale.device)
        return self


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    """Return W x + b for a plain weight or, with a scale, a quantised one.

    A small batch does not dequantise the whole weight.

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
    operand = weight.to(x.dtype)  # a copy, changed in place below to avoid another
    if x.dtype == torch.float16:  # sums of integer codes would overflow float16
        return F.linear(x, operand.mul_(1 / UNIT).mul_((scale[:, None] * UNIT).half()), bias)
    y = F.linear(x, operand) * scale
    return (y if bias is None else y + bias).to(x.dtype)
