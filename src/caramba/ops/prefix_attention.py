"""The op `caramba::prefix_attention`: causal attention, in one softmax with a part whose output is known."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import call_op, caramba_op, upcast

HALF = (torch.float16, torch.bfloat16)
WIDEST, STEP = 128, 8
FLASH_WIDEST = 256
SHORTEST = 64
"""Queries that the reference attends from at once with a window, at least."""


def prefix_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_out: Tensor,
    prefix_lse: Tensor,
    window: int | None = None,
    first: Tensor | None = None,
) -> Tensor:
    """Return causal attention to k and v and, in the same softmax, to what each query has seen elsewhere.

    With s = q k^T, l = logsumexp(s) of the keys that a query sees and L = log(exp(l) + exp(prefix_lse)):

        out = sum_u exp(s_u - L) v_u + exp(prefix_lse - L) prefix_out

    Queries arrive scaled, and are the last T of the S tokens. Query heads share key/value heads in consecutive groups.
    A query sees the last `window` tokens, its own included, or all, and none before `first`, the first token of its
    document (see `Documents`); then T = S. The gradient of s is that of the whole softmax,
    exp(s_u - L) (dout . v_u - dout . out), so a fused backward that is given L and `out` of the whole computes it, as
    context parallelism does. With a window work and memory are linear in T.

    Shape: q [B, H, T, Dqk], k [B, K, S, Dqk], v [B, K, S, D] of one dtype, prefix_out [B, H, T, D] in it or in at least
    fp32, prefix_lse [B, H, T, 1] in at least fp32, first int64 [B, T]; returns [B, H, T, D] in q's dtype.

    Raises:
        ConfigError: shapes or dtypes that do not fit.

    Reference: Liu et al., 2023, arXiv:2310.01889 (attention over parts of the keys).
    """
    _check(q, k, v, prefix_out, prefix_lse, window, first)
    return attend_with_prefix(q, k, v, prefix_out, prefix_lse, window, first)[0]


def attend_with_prefix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_out: Tensor,
    prefix_lse: Tensor,
    window: int | None,
    first: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the output of `prefix_attention` and the log-sum-exp L [B, H, T, 1], which has no gradient."""
    given = (q, k, v, prefix_out, prefix_lse, window, first)
    if q.is_cuda and not _has_kernel(q, v):
        out, lse = reference_prefix_attention(*given)
        return out, lse.detach()
    out, lse = call_op("prefix_attention", *given)
    return out, lse


def _has_kernel(q: Tensor, v: Tensor) -> bool:
    is_narrow = max(q.shape[-1], v.shape[-1]) <= FLASH_WIDEST
    return q.dtype in HALF and is_narrow and torch.cuda.get_device_capability(q.device) >= (8, 0)


def has_fused_widths(dtype: torch.dtype, qk: int, value: int) -> bool:
    """True if the kernel supports the widths: 16 bits, at most 128 features, multiples of 8."""
    return dtype in HALF and all(width <= WIDEST and width % STEP == 0 for width in (qk, value))


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_out: Tensor,
    prefix_lse: Tensor,
    window: int | None,
    first: Tensor | None,
) -> None:
    expected = (*q.shape[:3], v.shape[-1])
    if (
        (q.dim(), k.dim()) != (4, 4)
        or (k.shape[0], k.shape[-1]) != (q.shape[0], q.shape[-1])
        or q.shape[1] % k.shape[1]
        or k.shape[2] < q.shape[2]
        or v.shape[:3] != k.shape[:3]
        or prefix_out.shape != expected
    ):
        raise ConfigError(
            f"prefix_attention: got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, prefix_out "
            f"{tuple(prefix_out.shape)}; expected [B, H, T, Dqk], [B, K, S, Dqk], [B, K, S, D] and [B, H, T, D]"
        )
    if prefix_lse.shape != (*q.shape[:3], 1):
        raise ConfigError(f"prefix_attention: got prefix_lse {tuple(prefix_lse.shape)}, expected {(*q.shape[:3], 1)}")
    wide = torch.promote_types(q.dtype, torch.float32)
    dtypes = (k.dtype, v.dtype, prefix_out.dtype, prefix_lse.dtype)
    expected_dtypes = [(q.dtype, q.dtype, dtype, wide) for dtype in (q.dtype, wide)]
    if not q.is_floating_point() or dtypes not in expected_dtypes:
        raise ConfigError(
            f"prefix_attention: got q {q.dtype}, k, v, prefix_out, prefix_lse {dtypes}; expected one dtype of q, k "
            f"and v, that or {wide} of prefix_out, and {wide} of prefix_lse"
        )
    documents = None if first is None else tuple(first.shape)
    if (window is not None and window < 1) or documents not in (None, (k.shape[0], k.shape[2])):
        raise ConfigError(
            f"prefix_attention: got window {window} and first {documents} for {q.shape[2]} queries on {k.shape[2]} "
            "keys; expected a window of 1 or more, and [B, T] of as many queries as keys"
        )


def _fake(q: Tensor, k: Tensor, v: Tensor, prefix_out: Tensor, prefix_lse: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    # Memory order [B, T, H, D]: what the linear layer that reads the heads takes without a copy.
    batch, heads, length, width = prefix_out.shape
    return q.new_empty((batch, length, heads, width)).transpose(1, 2), prefix_lse.new_empty(prefix_lse.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    *tensors, ctx.window, first = inputs
    ctx.save_for_backward(*tensors, *output, first)


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    q, k, v, prefix_out, prefix_lse, out, lse, first = ctx.saved_tensors
    parts = torch.ops.caramba.prefix_attention_backward.default(grad, q, k, v, out, lse, ctx.window, first)
    wide, share = upcast(grad), (prefix_lse - lse).exp()
    grad_lse = share * (wide * (prefix_out - out)).sum(-1, keepdim=True)
    return *parts, (share * wide).to(prefix_out.dtype), grad_lse, None, None


@caramba_op("prefix_attention", fake=_fake, setup=_setup, backward=_backward)
def reference_prefix_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_out: Tensor,
    prefix_lse: Tensor,
    window: int | None,
    first: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute the op in plain PyTorch: the output, and the log-sum-exp L [B, H, T, 1] of the whole."""
    out, lse = _fake(q, k, v, prefix_out, prefix_lse)
    for rows, seen, scores in _parts(q, k, window, first):
        kept, known = _grouped(prefix_out, k, rows), _grouped(prefix_lse, k, rows)
        total = torch.logaddexp(scores.logsumexp(-1, keepdim=True), known)
        found = (scores - total).exp() @ upcast(v[:, :, seen]) + (known - total).exp() * kept
        out[:, :, rows] = _by_head(found, q).to(out.dtype)
        lse[:, :, rows] = _by_head(total, q)
    return out, lse


@caramba_op(
    "prefix_attention_backward",
    fake=lambda grad, q, k, v, *_: tuple(torch.empty_like(x) for x in (q, k, v)),
)
def reference_prefix_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    window: int | None,
    first: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v in plain PyTorch, from the output and log-sum-exp of the whole."""
    found = [torch.zeros_like(upcast(x)) for x in (q, k, v)]
    for rows, seen, scores in _parts(q, k, window, first):
        wide, whole, total = (_grouped(x, k, rows) for x in (grad, out, lse))
        weights = (scores - total).exp()
        through = weights * (wide @ upcast(v[:, :, seen]).mT - (wide * whole).sum(-1, keepdim=True))
        found[0][:, :, rows] = _by_head(through @ upcast(k[:, :, seen]), q)
        found[1][:, :, seen] += through.mT @ _grouped(q, k, rows)
        found[2][:, :, seen] += weights.mT @ wide
    grad_q, grad_k, grad_v = (torch.empty_like(x).copy_(one) for x, one in zip((q, k, v), found, strict=True))
    return grad_q, grad_k, grad_v


def _parts(q: Tensor, k: Tensor, window: int | None, first: Tensor | None) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield queries, the keys that one of them sees, and their scores, minus infinity where a query sees no key.

    Shape: [B, K, G * t, s] for t queries of G heads and s keys.
    """
    n_queries, before = q.shape[2], k.shape[2] - q.shape[2]
    size = n_queries if window is None else max(window // 2, SHORTEST)
    for start in range(0, n_queries, size):
        end = min(start + size, n_queries)
        low = 0 if window is None else max(before + start - window + 1, 0)
        rows, seen = slice(start, end), slice(low, before + end)
        places = torch.arange(before + start, before + end, device=q.device)[:, None]
        keys = torch.arange(low, before + end, device=q.device)
        hidden = keys > places
        if window is not None:
            hidden = hidden | (keys <= places - window)
        if first is not None:
            hidden = (hidden | (keys < first[:, rows, None]))[:, None, None]
        scores = _grouped(q, k, rows) @ upcast(k[:, :, seen]).mT
        yield rows, seen, scores.unflatten(2, (-1, end - start)).masked_fill(hidden, -math.inf).flatten(2, 3)


def _grouped(x: Tensor, k: Tensor, rows: slice) -> Tensor:
    """Return rows of x by key/value head, in at least float32. Shape: [B, H, T, E] to [B, K, G * t, E]."""
    return upcast(x[:, :, rows]).unflatten(1, (k.shape[1], -1)).flatten(2, 3)


def _by_head(x: Tensor, q: Tensor) -> Tensor:
    """Return what `_grouped` takes. Shape: [B, K, G * t, E] to [B, H, t, E]."""
    return x.unflatten(2, (q.shape[1] // x.shape[1], -1)).flatten(1, 2)
