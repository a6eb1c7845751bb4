"""The op `caramba::small_batch_linear`: a linear map of a few rows (GEMV, skinny GEMM) with fused norm and sum."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import caramba_op, direct, upcast
from caramba.ops.packed_int4 import FIELDS, SHARED, WORDS, reference_dequantize_int4
from caramba.ops.rms_norm import reference_rms_norm
from caramba.ops.swiglu import reference_swiglu_packed

MAX_ROWS = 64
"""Maximum rows of a call: the tokens of a decode step, which is bound by reading the weights."""
MAX_ROWS_FP32 = 8
"""Maximum rows of the float32 kernels, which have no tensor cores."""
WIDEST = 16384
"""Widest row of the kernels: a whole row is in the registers of a program."""
NARROW = (torch.bfloat16, torch.float16, torch.float32)
CODES = torch.int8


def small_batch_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float | None = None,
    gated: bool = False,
) -> Tensor:
    """Return y = act(W rms_norm(x) + b) + residual for a few rows x, sums in at least fp32.

    With `eps` rows are normalised first, by the weight `norm` if there is one. `gated` takes [gate; up] for W and b and
    silu(gate) * up for act, which is the identity otherwise. With a `scale` the weight is int8: W_nk is scale_n
    weight_nk. Each of norm, product with bias, gate and sum rounds to x's dtype, as the separate ops do. There are no
    gradients.

    An int4 weight has four codes in a word (`packed_int4`): W_nk is q_nk s + z, with the scale and the zero of its
    group of inputs. The 16-bit kernels round it to x's dtype.

    Shape: x [..., K] of at most 64 rows, weight [N, K], bias [N], scale [N], residual [..., N], norm [K], to [..., N];
    gated N is 2F, and residual and result are [..., F]. All of x's dtype, but norm of any floating one, and codes int8
    with a scale in fp32. Words are int16 [N, K / 4], with a scale of bfloat16 [N, K / G, 2].

    Raises:
        ConfigError: shapes, dtypes or devices that do not fit, more rows, or gradients that are wanted.

    Reference: Zhang and Sennrich, 2019, arXiv:1910.07467; Shazeer, 2020, arXiv:2002.05202.
    """
    _check(x, weight, scale, bias, residual, norm, eps, gated)
    if not rows_fit(x, weight):  # no kernel takes it, attached or not
        return reference_small_batch_linear(x, weight, scale, bias, residual, norm, eps, gated)
    run = (
        direct("small_batch_linear", x, weight, scale, bias, residual, norm)
        or torch.ops.caramba.small_batch_linear.default
    )
    return run(x, weight, scale, bias, residual, norm, eps, gated)


def rows_fit(x: Tensor, weight: Tensor) -> bool:
    """True if the kernels support x and the weight: few rows, one 16- or 32-bit dtype, or a weight in int8 or int4."""
    most = MAX_ROWS_FP32 if x.dtype == torch.float32 else MAX_ROWS
    is_alike = x.dtype == weight.dtype or (weight.dtype in (CODES, WORDS) and x.dtype in NARROW)
    return 0 < x.numel() <= most * x.shape[-1] and is_alike and weight_fits(weight)


def weight_fits(weight: Tensor) -> bool:
    """True if the kernels support the weight."""
    return (
        weight.dtype in (*NARROW, CODES, WORDS)
        and weight.dim() == 2
        and weight.shape[1] * codes_of(weight) <= WIDEST
        and weight.is_contiguous()
    )


def codes_of(weight: Tensor) -> int:
    """Return the inputs per element of a weight: four for packed int4, else one."""
    return FIELDS if weight.dtype == WORDS else 1


def _check(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    norm: Tensor | None,
    eps: float | None,
    gated: bool,
) -> None:
    if not x.is_floating_point() or x.dim() < 1 or not 0 < x.numel() <= MAX_ROWS * x.shape[-1]:
        raise _wrong("x", _said(x), f"a floating [..., K] of 1 to {MAX_ROWS} rows")
    width = x.shape[-1]
    grouped = scale if scale is not None and scale.dim() == 3 else None
    has_words = grouped is not None
    n_columns = width // FIELDS if has_words else width
    if weight.dim() != 2 or weight.shape[1] != n_columns or (gated and weight.shape[0] % 2):
        raise _wrong("weight", _said(weight), f"[{'2F' if gated else 'N'}, {n_columns}]")
    n_out = weight.shape[0]
    has_codes = scale is not None
    of_weight = WORDS if has_words else CODES if has_codes else x.dtype
    of_scale: tuple[int, ...] = (n_out,)
    if grouped is not None:
        n_groups = grouped.shape[1]
        if n_groups == 0 or width % (FIELDS * n_groups):
            raise _wrong(
                "scale", _said(grouped), f"[{n_out}, K / G, 2] of groups that share {width} inputs evenly"
            )
        of_scale = (n_out, n_groups, 2)
    expected = {
        "weight": (weight, tuple(weight.shape), of_weight),
        "scale": (scale, of_scale, SHARED if has_words else torch.float32),
        "bias": (bias, (n_out,), x.dtype),
        "residual": (residual, (*x.shape[:-1], n_out // 2 if gated else n_out), x.dtype),
    }
    for name, (tensor, shape, dtype) in expected.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != x.device:
            behind = ", with a scale" if name == "weight" and has_codes else ""
            raise _wrong(name, _said(tensor), f"{dtype} of shape {shape} on {x.device}{behind}")
    if norm is not None and (eps is None or tuple(norm.shape) != (width,) or norm.device != x.device):
        raise _wrong("norm", f"{_said(norm)} with eps={eps}", f"({width},) on {x.device}, and an eps")
    given = (x, weight, bias, residual, norm)
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in given):
        raise _wrong("gradients", "inputs that require some", "none; call it under torch.inference_mode()")


def _said(x: Tensor) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)} on {x.device}"


def _wrong(name: str, got: str, expected: str) -> ConfigError:
    return ConfigError(f"small_batch_linear: {name}: got {got}, expected {expected}")


@caramba_op(
    "small_batch_linear",
    fake=lambda x, weight, scale, bias, residual, norm, eps, gated: x.new_empty(
        (*x.shape[:-1], weight.shape[0] // (2 if gated else 1))
    ),
)
def reference_small_batch_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    norm: Tensor | None,
    eps: float | None,
    gated: bool,
) -> Tensor:
    """Compute the op in plain PyTorch."""
    rows = x if eps is None else reference_rms_norm(x, norm, eps)[0]
    wide = upcast(rows)
    if scale is None:
        y = F.linear(wide, upcast(weight), None if bias is None else upcast(bias))
    elif weight.dtype == WORDS:
        weight = reference_dequantize_int4(weight, scale, wide.dtype)
        y = F.linear(wide, weight, None if bias is None else upcast(bias))
    else:
        y = F.linear(wide, weight.to(wide.dtype)) * scale
        y = y if bias is None else y + upcast(bias)
    y = y.to(x.dtype)
    if gated:
        y = reference_swiglu_packed(y)
    return (y if residual is None else (upcast(y) + upcast(residual)).to(x.dtype)).contiguous()
