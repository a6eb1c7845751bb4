"""The op `caramba::prefix_attention`: causal attention after a prefix whose output and log-sum-exp are known."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import call_op, caramba_op, upcast

HALF = (torch.float16, torch.bfloat16)
WIDEST, STEP = 128, 8


def prefix_attention(q: Tensor, k: Tensor, v: Tensor, prefix_out: Tensor, prefix_lse: Tensor) -> Tensor:
    """Return causal attention to k and v and, in the same softmax, to a prefix that every query sees.

    With s = q k^T, l = logsumexp(s) of the keys that a query sees and L = log(exp(l) + exp(prefix_lse)):

        out = sum_u exp(s_u - L) v_u + exp(prefix_lse - L) prefix_out

    Queries arrive scaled. The gradient of s is that of the whole softmax, exp(s_u - L) (dout . v_u - dout . out), so a
    fused backward that is given L and `out` of the whole computes it, as context parallelism does.

    Shape: q and k [B, H, T, Dqk], v [B, H, T, D] of one dtype, prefix_out [B, H, T, D] and prefix_lse [B, H, T, 1] in
    at least fp32; returns [B, H, T, D] in q's dtype.

    Raises:
        ConfigError: shapes or dtypes that do not fit.

    Reference: Liu et al., 2023, arXiv:2310.01889 (attention over parts of the keys).
    """
    _check(q, k, v, prefix_out, prefix_lse)
    out, _ = call_op("prefix_attention", q, k, v, prefix_out, prefix_lse)
    return out


def has_fused_widths(dtype: torch.dtype, qk: int, value: int) -> bool:
    """True if the kernel supports the widths: 16 bits, at most 128 features, multiples of 8."""
    return dtype in HALF and all(width <= WIDEST and width % STEP == 0 for width in (qk, value))


def _check(q: Tensor, k: Tensor, v: Tensor, prefix_out: Tensor, prefix_lse: Tensor) -> None:
    expected = (*q.shape[:3], v.shape[-1])
    if q.dim() != 4 or k.shape != q.shape or v.shape != expected or prefix_out.shape != expected:
        raise ConfigError(
            f"prefix_attention: got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, prefix_out "
            f"{tuple(prefix_out.shape)}; expected [B, H, T, Dqk] twice and [B, H, T, D] twice"
        )
    if prefix_lse.shape != (*q.shape[:3], 1):
        raise ConfigError(
            f"prefix_attention: got prefix_lse {tuple(prefix_lse.shape)}, expected {(*q.shape[:3], 1)}"
        )
    wide = torch.promote_types(q.dtype, torch.float32)
    dtypes = (k.dtype, v.dtype, prefix_out.dtype, prefix_lse.dtype)
    if not q.is_floating_point() or dtypes != (q.dtype, q.dtype, wide, wide):
        raise ConfigError(
            f"prefix_attention: got q {q.dtype}, k, v, prefix_out, prefix_lse {dtypes}; expected one dtype of q, k "
            f"and v, and {wide} of the prefix"
        )


def _fake(q: Tensor, k: Tensor, v: Tensor, prefix_out: Tensor, prefix_lse: Tensor) -> tuple[Tensor, Tensor]:
    # Memory order [B, T, H, D]: what the linear layer that reads the heads takes without a copy.
    batch, heads, length, width = prefix_out.shape
    return q.new_empty((batch, length, heads, width)).transpose(1, 2), prefix_lse.new_empty(prefix_lse.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 5
    q, k, v, prefix_out, prefix_lse, out, lse = ctx.saved_tensors
    parts = torch.ops.caramba.prefix_attention_backward.default(grad, q, k, v, out, lse)
    wide, share = upcast(grad), (prefix_lse - lse).exp()
    grad_lse = share * (wide * (prefix_out - out)).sum(-1, keepdim=True)
    return *parts, share * wide, grad_lse


@caramba_op("prefix_attention", fake=_fake, setup=_setup, backward=_backward)
def reference_prefix_attention(
    q: Tensor, k: Tensor, v: Tensor, prefix_out: Tensor, prefix_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the op in plain PyTorch: the output, and the log-sum-exp L [B, H, T, 1] of the whole."""
    scores = _scores(q, k)
    lse = torch.logaddexp(scores.logsumexp(-1, keepdim=True), prefix_lse)
    out = (scores - lse).exp() @ upcast(v) + (prefix_lse - lse).exp() * prefix_out
    return out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2), lse.contiguous()


@caramba_op(
    "prefix_attention_backward",
    fake=lambda grad, q, k, v, *_: tuple(torch.empty_like(x) for x in (q, k, v)),
)
def reference_prefix_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v in plain PyTorch, from the output and log-sum-exp of the whole."""
    wide, weights = upcast(grad), (_scores(q, k) - lse).exp()
    through = weights * (wide @ upcast(v).mT - (wide * out).sum(-1, keepdim=True))
    found = through @ upcast(k), through.mT @ upcast(q), weights.mT @ wide
    grad_q, grad_k, grad_v = (torch.empty_like(x).copy_(one) for x, one in zip((q, k, v), found, strict=True))
    return grad_q, grad_k, grad_v


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """Return causal scores [B, H, T, T], minus infinity where a query does not see the key."""
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return (upcast(q) @ upcast(k).mT).masked_fill(hidden, -math.inf)
