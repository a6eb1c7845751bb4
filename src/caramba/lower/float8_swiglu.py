"""Pass `float8_swiglu`: a float8 SwiGLU as one autograd function, whose kernels cast the activations they compute."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from caramba.cache import Context
from caramba.layer.swiglu import SwiGLULayer
from caramba.lower.float8 import Float8Linear, float8_mm, float8_mm_exact, pad_rows, unpad_rows
from caramba.lower.lowering import Replaced, is_unmodified, replace_each
from caramba.ops.float8_cast import float8_cast, float8_swiglu, float8_swiglu_backward


class Float8SwiGLU(SwiGLULayer):
    """A gated network of float8 layers that runs as one function."""

    gate: Float8Linear
    up: Float8Linear
    down: Float8Linear

    def forward(self, x: Tensor, ctx: Context | None = None) -> Tensor:
        return float8_feed_forward(x, self.gate, self.up, self.down)


def fuse_float8_swiglu(model: nn.Module, *, is_compiled: bool) -> list[Replaced]:
    """Lower gated networks whose three layers are unmodified, of one float8 recipe with the kernels; return them."""
    return replace_each(
        model,
        SwiGLULayer,
        Float8SwiGLU,
        lambda module: is_unmodified(module, SwiGLULayer) and is_fusible_swiglu((module.gate, module.up, module.down)),
    )


def is_fusible_swiglu(layers: Sequence[nn.Module]) -> bool:
    """True if gate, up and down are unmodified float8 layers whose recipe has a fused SwiGLU kernel."""
    first = layers[0]
    return (
        isinstance(first, Float8Linear)
        and first.recipe.has_swiglu
        and all(
            isinstance(layer, Float8Linear)
            and is_unmodified(layer, Float8Linear)
            and layer.recipe is first.recipe
            and layer.bias is None
            and type(layer.weight) is nn.Parameter
            and layer.weight.dtype == first.weight.dtype
            for layer in layers
        )
    )


def float8_feed_forward(x: Tensor, gate: Float8Linear, up: Float8Linear, down: Float8Linear) -> Tensor:
    """Return down(silu(gate(x)) * up(x)) with products as `float8_linear` has them, gate and up as one.

    Neither silu(gate) * up nor the gradient of gate and up is in memory in 16 bits.

    Shape: x [..., M] -> [..., M], through F features, in the dtype of x, or of autocast where it is on.

    Reference: Shazeer, 2020, arXiv:2002.05202; Micikevicius et al., 2022, arXiv:2209.05433.
    """
    rows, n_rows = pad_rows(x)
    both = torch.cat((gate.weight, up.weight))
    y: Any = _Float8FeedForward.apply(rows, both, down.weight, gate.recipe.per_tensor)
    return unpad_rows(y, n_rows).reshape(*x.shape[:-1], down.weight.shape[0])


class _Float8FeedForward(torch.autograd.Function):
    """y = h W_d^T with h = silu(g) * u and [g, u] = x [W_g, W_u]^T, of float8 numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, both: Tensor, down: Tensor, per_tensor: bool) -> Tensor:
        rows, row_scale, *x_columns = float8_cast(x, per_tensor=per_tensor)
        w_rows, w_scale, *w_columns = float8_cast(both, per_tensor=per_tensor)
        packed = float8_mm(rows, w_rows, row_scale, w_scale, x.dtype, use_fast_accum=True)
        rows, row_scale, *h_columns = float8_swiglu(packed, per_tensor=per_tensor)
        w_rows, w_scale, *d_columns = float8_cast(down, per_tensor=per_tensor)
        ctx.per_tensor, ctx.dtypes = per_tensor, (x.dtype, both.dtype, down.dtype)
        ctx.save_for_backward(packed, *x_columns, *w_columns, *h_columns, *d_columns)
        return float8_mm(rows, w_rows, row_scale, w_scale, x.dtype, use_fast_accum=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        packed, x, x_scale, w, w_scale, h, h_scale, d, d_scale = ctx.saved_tensors
        per_tensor, (x_dtype, both_dtype, down_dtype) = ctx.per_tensor, ctx.dtypes
        g, g_scale, g_columns, g_column_scale = float8_cast(grads[0], per_tensor=per_tensor, e5m2=per_tensor)
        grad_down = float8_mm_exact(g_columns, h, g_column_scale, h_scale, x_dtype, per_tensor).to(down_dtype)
        if per_tensor:
            grad_h = float8_mm(g, d, g_scale, d_scale, x_dtype)
        else:  # whose scales the next op multiplies with
            one = g_scale.new_ones((1, 1))
            grad_h = float8_mm(g, d, one, one, x_dtype)
        g, g_scale, g_columns, g_column_scale = float8_swiglu_backward(
            grad_h, g_scale, d_scale, packed, per_tensor=per_tensor
        )
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = float8_mm_exact(g, w, g_scale, w_scale, x_dtype, per_tensor)
        grad_both = float8_mm_exact(g_columns, x, g_column_scale, x_scale, x_dtype, per_tensor).to(both_dtype)
        return grad_x, grad_both, grad_down, None
