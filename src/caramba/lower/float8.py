"""Linear layers whose matrix products, forward and backward, are of float8 numbers."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from caramba.ops import implementation
from caramba.ops.backend import REFERENCE
from caramba.ops.float8_cast import float8_cast

RecipeName = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
TILE = 16  # of all sides of a product
OURS = ("tensorwise", "rowwise")
"""Recipes whose casts are of a matrix and its transpose, which a kernel of ours makes in two passes."""

SWIGLU = ("float8_swiglu", "float8_swiglu_backward")


class Float8Recipe:
    """How numbers are scaled and which products are of float8 numbers: torchao's recipe of that name.

    Numbers are torchao's. Where a kernel casts on the device, it does so for the first two recipes; torchao does
    elsewhere, and for the third.

    Raises:
        ModuleNotFoundError: torchao is missing where it is to cast.
    """

    def __init__(self, name: RecipeName, device: torch.device | str) -> None:
        self.name, self.per_tensor = name, name == "tensorwise"
        self.is_ours = name in OURS and implementation("float8_cast", device) != REFERENCE
        self.has_swiglu = self.is_ours and all(implementation(op, device) != REFERENCE for op in SWIGLU)
        self.product: Any = None
        self.options: tuple[Any, ...] = ()
        if not self.is_ours:
            self.product, *options = _torchaos(name)
            self.options = tuple(options)

    @property
    def casts(self) -> str:
        """What casts."""
        return ("kernels, SwiGLU's too" if self.has_swiglu else "kernels") if self.is_ours else "torchao"


def _torchaos(name: RecipeName) -> tuple[Any, ...]:
    """torchao's product, and what it takes besides two matrices."""
    from torchao.float8 import Float8LinearConfig  # slow to import
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
    from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

    config = Float8LinearConfig.from_recipe_name(name)
    parts = config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight
    sums = LinearMMConfig(*(ScaledMMConfig(False, part.use_fast_accum, False, False) for part in parts))
    return matmul_with_hp_or_float8_args, sums, config


class Float8Linear(nn.Linear):
    """Linear map y = W x + b by `float8_linear`, on the parameters of a plain layer."""

    def __init__(self, plain: nn.Linear, recipe: Float8Recipe) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=False, device="meta")
        self.weight, self.bias, self.recipe = plain.weight, plain.bias, recipe

    def forward(self, input: Tensor) -> Tensor:
        return float8_linear(input, self.weight, self.bias, self.recipe)


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Float8Recipe) -> Tensor:
    """Return W x + b with float8 matrix products in forward and backward, scaled by the recipe:

        tensorwise          one scale for a tensor; gradients in e5m2
        rowwise             a scale, a power of two, for every row that a product sums over; all in e4m3
        rowwise_with_gw_hp  as rowwise, and W's gradient from 16 bits

    Rows are padded to a multiple of 16.

    Shape: x [..., K], weight [N, K], bias [N] -> [..., N] in the dtype of x, or of autocast where it is on.

    Reference: Micikevicius et al., 2022, arXiv:2209.05433.
    """
    padded, n_rows = pad_rows(x)
    y: Any
    if recipe.is_ours:
        y = Float8Product.apply(padded, weight, recipe.per_tensor)
    else:
        y = recipe.product.apply(padded, weight.t(), *recipe.options)
    y = unpad_rows(y, n_rows).reshape(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias.to(y.dtype)


def pad_rows(x: Tensor) -> tuple[Tensor, int]:
    """Return x [..., K] as a matrix with rows padded to a multiple of 16, and its number of rows.

    Under autocast x is cast to the autocast dtype.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    rows = x.reshape(-1, x.shape[-1])
    spare = -rows.shape[0] % TILE
    return F.pad(rows, (0, 0, 0, spare)) if spare else rows, rows.shape[0]


def unpad_rows(y: Tensor, n_rows: int) -> Tensor:
    """Return the first `n_rows` rows; y itself if that is all, which saves a copy in the backward."""
    return y if y.shape[0] == n_rows else y[:n_rows]


class Float8Product(torch.autograd.Function):
    """y = x W^T in float8, with gradients dx = g W and dW = g^T x in float8.

    Each of x, W and g is cast once, with its transpose, because float8 GEMMs read both operands row by row. The
    backward saves x and W in float8. The forward accumulates with fewer bits than the backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, per_tensor: bool) -> Tensor:
        rows, row_scale, *x_columns = float8_cast(x, per_tensor=per_tensor)
        w_rows, w_row_scale, *w_columns = float8_cast(weight, per_tensor=per_tensor)
        ctx.per_tensor, ctx.dtypes = per_tensor, (x.dtype, weight.dtype)
        ctx.save_for_backward(*x_columns, *w_columns)
        return float8_mm(rows, w_rows, row_scale, w_row_scale, x.dtype, use_fast_accum=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, x_scale, w, w_scale = ctx.saved_tensors
        x_dtype, w_dtype = ctx.dtypes
        # A gradient of one scale spans more than e4m3 does.
        g, g_scale, g_columns, g_column_scale = float8_cast(grads[0], per_tensor=ctx.per_tensor, e5m2=ctx.per_tensor)
        grad_x = float8_mm_exact(g, w, g_scale, w_scale, x_dtype, ctx.per_tensor) if ctx.needs_input_grad[0] else None
        grad_w = None
        if ctx.needs_input_grad[1]:
            grad_w = float8_mm_exact(g_columns, x, g_column_scale, x_scale, x_dtype, ctx.per_tensor).to(w_dtype)
        return grad_x, grad_w, None


def float8_mm_exact(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, per_tensor: bool
) -> Tensor:
    """Return a b^T times the scales, with full-precision accumulation.

    CUTLASS has no fast row-scaled GEMM of that kind, so the scales are multiplied afterwards; a compiler fuses that
    with the next op. Scales are powers of two, so this is exact.
    """
    if per_tensor:
        return float8_mm(a, b, a_scale, b_scale, dtype)
    one = a_scale.new_ones((1, 1))
    return (float8_mm(a, b, one, one, dtype) * a_scale * b_scale.t()).to(dtype)


def float8_mm(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, use_fast_accum: bool = False
) -> Tensor:
    """Return a b^T times row scales or tensor scales."""
    if a_scale.numel() == 1:  # of a whole tensor: a number
        a_scale, b_scale = a_scale.reshape(()), b_scale.reshape(())
    else:
        b_scale = b_scale.t()
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=dtype, use_fast_accum=use_fast_accum
    )
