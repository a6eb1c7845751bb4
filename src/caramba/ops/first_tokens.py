"""The op `caramba::first_tokens`: whole sequences attend to their exact first tokens, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import call_op, caramba_op, empty_upcast, upcast
from caramba.ops.rope import rotate_pairs, tables_fit

HALF = (torch.float16, torch.bfloat16)
WIDEST_HEAD, MOST_TOKENS = 128, 16


def first_tokens(q: Tensor, k: Tensor, v: Tensor, mean: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return what every position reads of the first n tokens of its sequence, and the log-sum-exp of its scores.

    With g the key/value head of head h, a position t scores token u <= t, u < n by

        s(t, u) = RoPE_t(q_h) . k_g,u - q_h . mean_g

    in at least fp32. Queries arrive scaled and before RoPE, keys after it. The tables get no gradient.

    Shape: q [B, H, T, D] of positions 0 to T - 1, k and v [B, K, n, D], mean [K, D], cos and sin [1, T, D/2]; returns
    [B, H, T, D] in q's dtype, whose memory order is [B, T, H, D], and [B, H, T, 1] in at least fp32.

    Raises:
        ConfigError: shapes or dtypes that do not fit.

    Reference: Xiao et al., 2023, arXiv:2309.17453 (first tokens as attention sinks).
    """
    batch, heads, length, width = q.shape
    expected = (batch, k.shape[1], k.shape[2], width)
    if tuple(k.shape) != expected or k.shape != v.shape or heads % k.shape[1] or not 0 < k.shape[2] <= length:
        raise ConfigError(
            f"first_tokens: got q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}; expected "
            "[B, H, T, D] and twice [B, K, n, D] with K a divisor of H and n at most T"
        )
    if tuple(mean.shape) != (k.shape[1], width) or not tables_fit(cos.shape, 1, 1, length, width) or cos.dim() != 3:
        raise ConfigError(
            f"first_tokens: got mean {tuple(mean.shape)} and cos {tuple(cos.shape)}; expected "
            f"{(k.shape[1], width)} and {(1, length, width // 2)}"
        )
    if q.is_cuda and not has_narrow_heads(q.dtype, width, k.shape[2]):
        return reference_first_tokens(q, k, v, mean, cos, sin)
    return call_op("first_tokens", q, k, v, mean, cos, sin)


def has_narrow_heads(dtype: torch.dtype, width: int, n_tokens: int) -> bool:
    """Whether kernels of the op take it: in 16 bits, with heads and tokens that their tiles hold."""
    return dtype in HALF and width <= WIDEST_HEAD and width % 2 == 0 and n_tokens <= MOST_TOKENS


def _fake(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, length, width = q.shape
    out = q.new_empty((batch, length, heads, width)).transpose(1, 2)
    return out, empty_upcast(q, (batch, heads, length, 1))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.caramba.first_tokens_backward.default(grad, grad_lse, *ctx.saved_tensors)
    return *found, None, None


@caramba_op("first_tokens", fake=_fake, setup=_setup, backward=_backward)
def reference_first_tokens(
    q: Tensor, k: Tensor, v: Tensor, mean: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the op in plain PyTorch."""
    out, lse = _fake(q, k)
    scores = _scores(q, k, mean, cos, sin)[0]
    total = scores.logsumexp(-1, keepdim=True)
    out.copy_(((scores - total).exp() @ _per_head(v, q)).flatten(1, 2))
    lse.copy_(total.flatten(1, 2))
    return out, lse


def _fake_backward(grad: Tensor, _: Tensor, q: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    batch, heads, length, width = q.shape
    grad_q = q.new_empty((batch, length, heads, width)).transpose(1, 2)
    return grad_q, *(x.new_empty(x.shape) for x in others[:3])


@caramba_op("first_tokens_backward", fake=_fake_backward)
def reference_first_tokens_backward(
    grad: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mean: Tensor,
    cos: Tensor,
    sin: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k, v and mean in plain PyTorch."""
    results = _fake_backward(grad, grad_lse, q, k, v, mean)
    scores, rotated = _scores(q, k, mean, cos, sin)
    n_groups = k.shape[1]
    wide, total, through_total = (upcast(x).unflatten(1, (n_groups, -1)) for x in (grad, lse, grad_lse))
    weights = (scores - total).exp()
    through = wide @ _per_head(v, q).mT
    grad_scores = weights * (through - (weights * through).sum(-1, keepdim=True) + through_total)
    summed = grad_scores.sum(-1, keepdim=True)
    grad_wide = rotate_pairs(grad_scores @ _per_head(k, q), upcast(cos), -upcast(sin))
    found = (
        (grad_wide - summed * upcast(mean)[:, None, None]).flatten(1, 2),
        (grad_scores.mT @ rotated).sum(2),
        (weights.mT @ wide).sum(2),
        -(summed * upcast(q).unflatten(1, (n_groups, -1))).sum((0, 2, 3)),
    )
    for result, value in zip(results, found, strict=True):
        result.copy_(value)
    return results[0], results[1], results[2], results[3]


def _per_head(x: Tensor, q: Tensor) -> Tensor:
    """Return keys or values for the heads of each group, in at least fp32. Shape: [B, K, n, D] -> [B, K, 1, n, D]."""
    return upcast(x).to(upcast(q).dtype)[:, :, None]


def _scores(q: Tensor, k: Tensor, mean: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores [B, K, G, T, n], minus infinity of later tokens, and the queries after RoPE [B, K, G, T, D]."""
    wide = upcast(q)
    rotated, plain = (
        x.unflatten(1, (k.shape[1], -1)) for x in (rotate_pairs(wide, cos.to(wide.dtype), sin.to(wide.dtype)), wide)
    )
    shift = plain @ mean.to(wide.dtype)[:, None, :, None]
    places = torch.arange(q.shape[2], device=q.device)
    hidden = places[: k.shape[2]] > places[:, None]
    return (rotated @ _per_head(k, q).mT - shift).masked_fill(hidden, float("-inf")), rotated
