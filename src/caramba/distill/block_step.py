"""A student's attention layer together with its distance to what the teacher's gave, made for a cheap backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from caramba.distill.block_loss import mean_abs, mean_l1
from caramba.layer import AttentionLayer, Documents
from caramba.ops.backend import upcast


class BlockStep(nn.Module):
    """Run a student's layer and compare it: its output, without gradient, mean |o_s - o_t| and mean |o_t|.

    One module, so that a compiled step reads outputs once for both means and for the signs that the backward needs.

    Shape: x and target [B, T, M], documents [B, T], -1 where padding is left out; output [B, T, M], means [].
    """

    def __init__(self, layer: AttentionLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self, x: Tensor, target: Tensor, apart: Documents | None = None, documents: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, out = self.layer.read(x, apart), self.layer.out
        size = mean_abs(target, documents)
        # In fp16 signs of a whole batch would sum to more than it holds.
        if type(out) is nn.Linear and out.bias is not None and heads.dtype != torch.float16:
            output, raw = _ComparedLinear.apply(heads, out.weight, out.bias, target, documents)  # pyright: ignore[reportGeneralTypeIssues]
            return output.detach(), raw, size
        output = out(heads)
        return output.detach(), mean_l1(output, target, documents), size


class _ComparedLinear(torch.autograd.Function):
    """o = W h + b and mean |o - t|, whose gradient in o is its sign times one number for all elements.

    That number goes where little is to be multiplied, into W and the weight's gradient: the backward reads the signs as
    they are, and no pass over outputs and targets makes a scaled copy of them. o itself gets no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, heads: Tensor, weight: Tensor, bias: Tensor, target: Tensor, documents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        output = F.linear(heads, weight.to(heads.dtype), bias.to(heads.dtype))
        difference = upcast(output) - upcast(target)
        count = difference.new_full((), difference.numel())
        if documents is not None:
            counted = (documents >= 0)[..., None]
            difference = difference * counted
            count = (counted.sum() * difference.shape[-1]).clamp_min(1).to(difference.dtype)
        ctx.save_for_backward(heads, weight, torch.sign(difference).to(heads.dtype), count)
        ctx.bias_dtype = bias.dtype
        return output, difference.abs().sum() / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        heads, weight, signs, count = ctx.saved_tensors
        scale = grads[1] / count
        rows, grad_weight = signs.flatten(0, -2), None
        grad_heads = (rows @ (weight * scale).to(signs.dtype)).view_as(heads)
        if ctx.needs_input_grad[1]:
            grad_weight = (rows.t() @ heads.flatten(0, -2)).to(weight.dtype) * scale
        grad_bias = (upcast(rows).sum(0) * scale).to(ctx.bias_dtype)
        return grad_heads, grad_weight, grad_bias, None, None
