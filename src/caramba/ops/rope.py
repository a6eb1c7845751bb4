"""Rotary embedding: the ops for cosines and sines, for one tensor and for a joined projection of queries and keys."""

from typing import Any

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import call_op, caramba_op, direct, refuse_tangents, upcast


def rope(x: Tensor, cos: Tensor, sin: Tensor, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    """Rotate the pairs of features p and p + D/2 by their angles, times `scale`.

        y[p] = scale (x[p] cos - x[p + D/2] sin),  y[p + D/2] = scale (x[p + D/2] cos + x[p] sin)

    Computed in at least fp32 and rounded once. The gradient is the transposed map, which is the rotation by the
    opposite angle. The tables get none.

    Shape: x [B, N, T, D]; cos and sin [G, T, D/2] or [B, G, T, D/2], where G divides N and head n reads group
    n // (N / G); returns [B, N, T, D] in x's order of strides and dtype, or in `dtype`.

    Raises:
        ConfigError: shapes or devices that do not fit, what is not floating, or tables that require gradients.

    Reference: Su et al., 2021, arXiv:2104.09864.
    """
    _check(x, cos, sin)
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"rope: dtype is {dtype}, expected a floating one")
    run = direct("rope", x, cos, sin) or torch.ops.caramba.rope.default
    return run(x, cos, sin, scale, False, dtype or x.dtype)


def _check(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    shape, table = x.shape, cos.shape
    if x.dim() != 4 or shape[-1] % 2 or not x.is_floating_point():
        raise ConfigError(f"rope: x is {x.dtype} of shape {tuple(shape)}, expected floating [B, N, T, D] with even D")
    if not tables_fit(table, *shape) or sin.shape != table or cos.dtype != sin.dtype or not cos.is_floating_point():
        raise ConfigError(
            f"rope: cos is {cos.dtype} {tuple(table)} and sin {sin.dtype} {tuple(sin.shape)} for x {tuple(shape)}; "
            f"expected both floating [G, {shape[2]}, {shape[3] // 2}], or the same with {shape[0]} in front, G a "
            f"divisor of {shape[1]}"
        )
    if cos.device != x.device or sin.device != x.device:
        raise ConfigError(f"rope: cos is on {cos.device}, sin on {sin.device}, x on {x.device}; expected one device")
    if cos.requires_grad or sin.requires_grad:
        raise ConfigError("rope: cos and sin require gradients, which this op does not give; detach them")


def tables_fit(table: torch.Size, batch: int, heads: int, n_tokens: int, width: int) -> bool:
    """Whether cosines of shape `table` are those of heads of `width`, in groups, or of each row."""
    return (
        len(table) in (3, 4)
        and table[-2:] == (n_tokens, width // 2)
        and table[-3] > 0
        and heads % table[-3] == 0
        and (len(table) == 3 or table[0] == batch)
    )


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs of features p and p + D/2 in x's dtype; the tables broadcast to its halves."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cos, sin, ctx.scale, ctx.inverse, _ = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    grad_x = call_op("rope", grad, cos, sin, ctx.scale, not ctx.inverse, ctx.dtype)
    return grad_x, None, None, None, None, None


@caramba_op(
    "rope",
    fake=lambda x, cos, sin, scale, inverse, dtype: torch.empty_like(x, dtype=dtype),
    setup=_setup,
    backward=_backward,
    is_linear=True,
)
def reference_rope(x: Tensor, cos: Tensor, sin: Tensor, scale: float, inverse: bool, dtype: torch.dtype) -> Tensor:
    """Compute the op in plain PyTorch."""
    repeats = x.shape[1] // cos.shape[-3]
    wide = upcast(x)
    cos, sin = (table.to(wide.dtype).repeat_interleave(repeats, -3) for table in (cos, sin))
    if inverse:
        sin = -sin
    return torch.empty_like(x, dtype=dtype).copy_(rotate_pairs(wide, cos, sin) * scale)


def cos_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of angles, without gradients.

    Inductor computes elementwise inputs of a kernel inside it: a rotation of 32 heads would take every cosine 64 times,
    which costs several times what it reads and writes. What an op gives out is in memory.

    Shape: any floating, to two of the same.

    Raises:
        ConfigError: angles that are not floating.
    """
    if not angles.is_floating_point():
        raise ConfigError(f"cos_sin: angles are {angles.dtype}, expected a floating dtype")
    return torch.ops.caramba.cos_sin.default(angles)


@caramba_op("cos_sin", fake=lambda angles: (torch.empty_like(angles), torch.empty_like(angles)), takes_kernel=False)
def reference_cos_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the op in plain PyTorch."""
    return angles.cos(), angles.sin()


def rope_cos_sin(offset: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of every position times every frequency, in float32, without gradients.

    One launch per step computes them for all layers; a compiled graph would compute them again at every use.

    Shape: offset [B, T] integers, frequencies [N, G, P] float32, to [N, B, G, T, P] twice.

    Raises:
        ConfigError: positions that are not integers [B, T], or frequencies that are not float32 [N, G, P].
    """
    if offset.dim() != 2 or offset.dtype not in (torch.int32, torch.int64):
        raise ConfigError(
            f"rope_cos_sin: offset is {offset.dtype} of shape {tuple(offset.shape)}, expected int32 or int64 [B, T]"
        )
    fits = frequencies.dim() == 3 and frequencies.dtype == torch.float32
    if not fits or frequencies.device != offset.device:
        raise ConfigError(
            f"rope_cos_sin: frequencies are {frequencies.dtype} {tuple(frequencies.shape)} on {frequencies.device}, "
            f"expected float32 [N, G, P] on {offset.device}"
        )
    return call_op("rope_cos_sin", offset, frequencies)


def _fake(offset: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    n, groups, pairs = frequencies.shape
    shape = (n, offset.shape[0], groups, offset.shape[1], pairs)
    return frequencies.new_empty(shape), frequencies.new_empty(shape)


@caramba_op("rope_cos_sin", fake=_fake)
def reference_rope_cos_sin(offset: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the op in plain PyTorch."""
    angles = offset.to(torch.float32)[None, :, None, :, None] * frequencies[:, None, :, None, :]
    return angles.cos(), angles.sin()


def rope_qkv(
    joined: Tensor, cos: Tensor, sin: Tensor, n_heads: int, n_kv_heads: int, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Split fused [q; k; v] into heads and apply `rope`: q' = scale R q, k' = R k, v' = v.

    Computed in at least fp32, rounded once. The gradient is the transposed map, written as one tensor:
    d[q; k; v] = [scale R^T dq'; R^T dk'; dv']. The tables get none.

    Shape: joined [B, T, (H + 2K) D], cos and sin [1, T, D/2] or [B, 1, T, D/2] -> q [B, H, T, D], k and v [B, K, T, D],
    each in memory as [B, T, heads, D], in joined's dtype.

    Raises:
        ConfigError: shapes or devices that do not fit, or tables that require gradients.

    Reference: Su et al., 2021, arXiv:2104.09864.
    """
    _check_rope_qkv(joined, cos, sin, n_heads, n_kv_heads)
    refuse_tangents("rope_qkv", joined)
    return torch.ops.caramba.rope_qkv.default(joined, cos, sin, n_heads, n_kv_heads, scale)


def _check_rope_qkv(joined: Tensor, cos: Tensor, sin: Tensor, n_heads: int, n_kv_heads: int) -> None:
    heads, table = n_heads + 2 * n_kv_heads, cos.shape
    fits = (
        joined.dim() == 3
        and joined.is_floating_point()
        and cos.is_floating_point()
        and min(n_heads, n_kv_heads) > 0
        and len(table) in (3, 4)
        and table[-3:-1] == (1, joined.shape[1])
        and heads * 2 * table[-1] == joined.shape[-1]
        and (len(table) == 3 or table[0] == joined.shape[0])
    )
    if not fits or sin.shape != table or sin.dtype != cos.dtype:
        raise ConfigError(
            f"rope_qkv: the product is {joined.dtype} {tuple(joined.shape)}, cos {cos.dtype} {tuple(table)} and sin "
            f"{sin.dtype} {tuple(sin.shape)} for {n_heads} and {n_kv_heads} heads; expected one head of each or more, "
            f"floating [B, T, {heads} D] and both floating [1, T, D/2] or [B, 1, T, D/2]"
        )
    if cos.device != joined.device or sin.device != joined.device:
        raise ConfigError(
            f"rope_qkv: cos is on {cos.device}, sin on {sin.device}, product on {joined.device}; expected one device"
        )
    if cos.requires_grad or sin.requires_grad:
        raise ConfigError("rope_qkv: cos and sin require gradients, which this op does not give; detach them")


def _turned(x: Tensor, cos: Tensor, sin: Tensor, scale: float) -> Tensor:
    """Return scale R x, wide. Shape: [B, T, N, D]."""
    wide = upcast(x)
    return rotate_pairs(wide, *(table.to(wide.dtype).transpose(-3, -2) for table in (cos, sin))) * scale


def _fake_rope_qkv(
    joined: Tensor, cos: Tensor, sin: Tensor, n_heads: int, n_kv_heads: int, scale: float
) -> tuple[Tensor, ...]:
    batch, tokens, width = joined.shape
    head_dim = width // (n_heads + 2 * n_kv_heads)
    return tuple(
        joined.new_empty(batch, tokens, heads, head_dim).transpose(1, 2) for heads in (n_heads, n_kv_heads, n_kv_heads)
    )


def _setup_rope_qkv(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, cos, sin, *ctx.how = inputs
    ctx.save_for_backward(cos, sin)


def _backward_rope_qkv(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    joined = torch.ops.caramba.rope_qkv_backward.default(*grads, *ctx.saved_tensors, *ctx.how)
    return joined, *(None,) * 5


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _setup_rope_qkv(ctx, inputs[2:], (output,))


def _backward_of_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The map is linear, so the gradient of its gradient is the map itself."""
    parts = torch.ops.caramba.rope_qkv.default(grad, *ctx.saved_tensors, *ctx.how)
    return *parts, *(None,) * 5


@caramba_op(
    "rope_qkv",
    fake=_fake_rope_qkv,
    setup=_setup_rope_qkv,
    backward=_backward_rope_qkv,
    is_linear=True,
    is_eager=False,
)
def reference_rope_qkv(
    joined: Tensor, cos: Tensor, sin: Tensor, n_heads: int, n_kv_heads: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the op in plain PyTorch."""
    parts = joined.unflatten(-1, (n_heads + 2 * n_kv_heads, -1)).split([n_heads, n_kv_heads, n_kv_heads], dim=2)
    q, k, v = (x.new_empty(x.shape) for x in parts)
    q.copy_(_turned(parts[0], cos, sin, scale))
    k.copy_(_turned(parts[1], cos, sin, 1.0))
    v.copy_(parts[2])
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


@caramba_op(
    "rope_qkv_backward",
    fake=lambda dq, dk, dv, cos, sin, n_heads, n_kv_heads, scale: dq.new_empty(
        dq.shape[0], dq.shape[2], (n_heads + 2 * n_kv_heads) * dq.shape[3]
    ),
    setup=_setup_backward,
    backward=_backward_of_backward,
    is_linear=True,
    is_eager=False,
)
def reference_rope_qkv_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, n_heads: int, n_kv_heads: int, scale: float
) -> Tensor:
    """Compute d[q; k; v] in plain PyTorch."""
    dq, dk, dv = (x.transpose(1, 2) for x in (dq, dk, dv))
    parts = (_turned(dq, cos, -sin, scale), _turned(dk, cos, -sin, 1.0), upcast(dv))
    return torch.cat(parts, dim=2).flatten(2).to(dq.dtype)
