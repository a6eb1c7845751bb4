"""The op `caramba::rope_qkv`: splits a fused QKV projection, and applies rotary embeddings to q and k."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import caramba_op, upcast
from caramba.ops.first_order import refuse_tangents


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
    _check(joined, cos, sin, n_heads, n_kv_heads)
    refuse_tangents("rope_qkv", joined)
    return torch.ops.caramba.rope_qkv.default(joined, cos, sin, n_heads, n_kv_heads, scale)


def _check(joined: Tensor, cos: Tensor, sin: Tensor, n_heads: int, n_kv_heads: int) -> None:
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
    first, second = upcast(x).chunk(2, dim=-1)
    cos, sin = (table.to(first.dtype).transpose(-3, -2) for table in (cos, sin))
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1) * scale


def _fake_rope_qkv(
    joined: Tensor, cos: Tensor, sin: Tensor, n_heads: int, n_kv_heads: int, scale: float
) -> tuple[Tensor, ...]:
    batch, tokens, width = joined.shape
    head_dim = width // (n_heads + 2 * n_kv_heads)
    return tuple(
        joined.new_empty(batch, tokens, heads, head_dim).transpose(1, 2)
        for heads in (n_heads, n_kv_heads, n_kv_heads)
    )


def _fake_rope_qkv_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, n_heads: int, n_kv_heads: int, scale: float
) -> Tensor:
    batch, _, tokens, head_dim = dq.shape
    return dq.new_empty(batch, tokens, (n_heads + 2 * n_kv_heads) * head_dim)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, cos, sin, *ctx.how = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    joined = torch.ops.caramba.rope_qkv_backward.default(*grads, *ctx.saved_tensors, *ctx.how)
    return joined, *(None,) * 5


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _setup(ctx, inputs[2:], (output,))


def _backward_of_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The map is linear, so the gradient of its gradient is the map itself."""
    parts = torch.ops.caramba.rope_qkv.default(grad, *ctx.saved_tensors, *ctx.how)
    return *parts, *(None,) * 5


@caramba_op("rope_qkv", fake=_fake_rope_qkv, setup=_setup, backward=_backward, is_linear=True, is_eager=False)
def reference_rope_qkv(
    joined: Tensor, cos: Tensor, sin: Tensor, n_heads: int, n_kv_heads: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the op in plain PyTorch."""
    parts = joined.unflatten(-1, (n_heads + 2 * n_kv_heads, -1)).split(
        [n_heads, n_kv_heads, n_kv_heads], dim=2
    )
    q, k, v = (x.new_empty(x.shape) for x in parts)
    q.copy_(_turned(parts[0], cos, sin, scale))
    k.copy_(_turned(parts[1], cos, sin, 1.0))
    v.copy_(parts[2])
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


@caramba_op(
    "rope_qkv_backward",
    fake=_fake_rope_qkv_backward,
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
