"""Linear maps of a few rows (GEMV, skinny GEMM) with fused norm and sum; INT4 weights; a product for each head."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import (
    call_op,
    caramba_op,
    describe,
    direct,
    has_kernel,
    refusal,
    refuse_gradients,
    upcast,
)
from caramba.ops.latent_queries import HALF
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


_refuse = functools.partial(refusal, "small_batch_linear")


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
        raise _refuse("x", describe(x), f"a floating [..., K] of 1 to {MAX_ROWS} rows")
    width = x.shape[-1]
    grouped = scale if scale is not None and scale.dim() == 3 else None
    has_words = grouped is not None
    n_columns = width // FIELDS if has_words else width
    if weight.dim() != 2 or weight.shape[1] != n_columns or (gated and weight.shape[0] % 2):
        raise _refuse("weight", describe(weight), f"[{'2F' if gated else 'N'}, {n_columns}]")
    n_out = weight.shape[0]
    has_codes = scale is not None
    of_weight = WORDS if has_words else CODES if has_codes else x.dtype
    of_scale: tuple[int, ...] = (n_out,)
    if grouped is not None:
        n_groups = grouped.shape[1]
        if n_groups == 0 or width % (FIELDS * n_groups):
            raise _refuse("scale", describe(grouped), f"[{n_out}, K / G, 2] of groups that share {width} inputs evenly")
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
            raise _refuse(name, describe(tensor), f"{dtype} of shape {shape} on {x.device}{behind}")
    if norm is not None and (eps is None or tuple(norm.shape) != (width,) or norm.device != x.device):
        raise _refuse("norm", f"{describe(norm)} with eps={eps}", f"({width},) on {x.device}, and an eps")
    given = (x, weight, bias, residual, norm)
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in given):
        raise _refuse("gradients", "inputs that require some", "none; call it under torch.inference_mode()")


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


def per_head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x_h W_h for every head h, sums in at least fp32, rounded once; there are no gradients.

    Shape: x [B, T, H, R] of any strides, weight [H, R, D], to [B, T, H, D], contiguous, in x's dtype.

    Raises:
        ConfigError: shapes, dtypes or devices that do not fit, or gradients that are wanted.
    """
    if x.dim() != 4 or not x.is_floating_point():
        raise ConfigError(f"per_head_linear: x is {x.dtype} of shape {tuple(x.shape)}, expected floating [B, T, H, R]")
    fits = weight.dim() == 3 and weight.shape[:2] == x.shape[2:] and weight.is_floating_point()
    if not fits or weight.device != x.device:
        raise ConfigError(
            f"per_head_linear: weight is {weight.dtype} {tuple(weight.shape)} on {weight.device}, expected floating "
            f"[{x.shape[2]}, {x.shape[3]}, D] on {x.device}"
        )
    refuse_gradients("per_head_linear", x, weight)
    if has_kernel("per_head_linear", x) and x.dtype not in HALF:
        return reference_per_head_linear(x, weight)
    return call_op("per_head_linear", x, weight)


@caramba_op("per_head_linear", fake=lambda x, weight: x.new_empty((*x.shape[:-1], weight.shape[-1])))
def reference_per_head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Compute the op in plain PyTorch."""
    wide = upcast(x)
    return torch.einsum("bthr,hrd->bthd", wide, weight.to(x.dtype).to(wide.dtype)).to(x.dtype).contiguous()


WORDS = torch.int16
FIELDS = 4
"""Codes of a word."""
SHARED = torch.bfloat16
"""Dtype of the scale and the zero of a group."""


def pack_int4(codes: Tensor, group: int) -> Tensor:
    """Pack codes 0 to 15 into words of four.

    Word j of a group has at bits 4f the code of its feature f G / 4 + j. Codes at the same bits of neighbouring words
    are neighbouring features, so that a mask yields pairs and kernels need no shuffle.

    Shape: [N, K], K a multiple of the group G and G of 4, to int16 [N, K / 4].
    """
    fields = codes.to(torch.int32).unflatten(1, (-1, FIELDS, group // FIELDS))
    words = fields[:, :, 0] | fields[:, :, 1] << 4 | fields[:, :, 2] << 8 | fields[:, :, 3] << 12
    return words.to(WORDS).flatten(1).contiguous()


def dequantize_int4(words: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight q s + z of packed codes, rounded once.

    Shape: words int16 [N, K / 4], scale bfloat16 [N, K / G, 2] of a scale and a zero each, to [N, K].

    Raises:
        ConfigError: shapes or dtypes that do not fit.
    """
    n_groups = scale.shape[1] if scale.dim() == 3 else 0
    fits = words.dtype == WORDS and words.dim() == 2 and n_groups > 0 and words.shape[1] % n_groups == 0
    if not fits or scale.dtype != SHARED or tuple(scale.shape) != (words.shape[0], n_groups, 2):
        raise ConfigError(
            f"dequantize_int4: got {words.dtype} {tuple(words.shape)} and {scale.dtype} {tuple(scale.shape)}, "
            f"expected {WORDS} [N, K / 4] and {SHARED} [N, K / G, 2]"
        )
    run = direct("dequantize_int4", words, scale) or torch.ops.caramba.dequantize_int4.default
    return run(words, scale, dtype)


@caramba_op(
    "dequantize_int4",
    fake=lambda words, scale, dtype: scale.new_empty((words.shape[0], words.shape[1] * FIELDS), dtype=dtype),
)
def reference_dequantize_int4(words: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the op in plain PyTorch."""
    n_rows, n_groups = scale.shape[:2]
    step, zero = scale.to(dtype)[..., None].unbind(2)
    y = torch.empty((n_rows, n_groups, FIELDS, words.shape[1] // n_groups), dtype=dtype, device=words.device)
    for field in range(FIELDS):
        # The sign comes along, and is masked. One field at a time takes half as long on a CPU as all together.
        codes = (words >> 4 * field).bitwise_and_(15).to(dtype).view(n_rows, n_groups, -1)
        torch.addcmul(zero, codes, step, out=y[:, :, field])
    return y.flatten(1)


def int4_matmul(x: Tensor, words: Tensor, scale: Tensor) -> Tensor:
    """Return W x for a few rows x without dequantising the weight.

    It multiplies codes by x group by group, and adds the zeros by the sums of x. On a CPU it takes a quarter to two
    thirds of the time of the dequantised product. Sums are in at least fp32, those within a group in bfloat16 where x
    is bfloat16.

    Shape: x [..., K], words int16 [N, K / 4], scale bfloat16 [N, K / G, 2], to [..., N] in x's dtype.
    """
    n_rows, n_groups = scale.shape[:2]
    rows = x.reshape(-1, x.shape[-1])
    # Whose range is less than that of sums of codes.
    rows = rows.float() if x.dtype == torch.float16 else rows
    places = rows.view(len(rows), n_groups, 2, 2, -1)  # byte of a word, half of it, word
    wide, sums = torch.promote_types(rows.dtype, torch.float32), None
    pairs = words.view(torch.uint8)
    for half, codes in enumerate((pairs & 15, pairs >> 4)):
        at = places[:, :, :, half].transpose(2, 3).flatten(2).permute(1, 2, 0)
        found = torch.bmm(codes.to(rows.dtype).view(n_rows, n_groups, -1).transpose(0, 1), at).to(wide)
        sums = found if sums is None else sums + found  # [groups, N, rows]
    assert sums is not None
    step, zero = scale.to(wide).unbind(2)
    y = (sums * step.t()[:, :, None]).sum(0).t()
    y = (y + places.to(wide).sum((2, 3, 4)) @ zero.t()).to(x.dtype)
    return y.contiguous().view(*x.shape[:-1], n_rows)


SMALL_BATCH_ROWS = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 2}
"""Rows up to which products by `small_batch_linear` are taken, by dtype.

The four products of a 1B layer with norm, gate and sums take 37 us by it with 1 row on an H200; with 8 rows of 16 bits
48 by it and 66 by the library, with 32 rows 52 and 68. Numbers of 32 bits have no tensor cores: there arithmetic takes
longer than reading the weights.
"""


def is_small_batch(x: Tensor) -> bool:
    """True if the small-batch kernel applies: kernel attached, few rows, no grad or autocast."""
    return (
        not torch.is_grad_enabled()
        and 0 < x.numel() <= SMALL_BATCH_ROWS.get(x.dtype, 0) * x.shape[-1]
        and has_kernel("small_batch_linear", x)
        and not torch.is_autocast_enabled(x.device.type)
    )
