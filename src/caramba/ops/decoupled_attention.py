"""The op `caramba::decoupled_attention`: causal attention over keys of two parts that are never joined, and its
gradient."""

import math
from typing import Any

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import call_op, caramba_op, has_kernel, upcast

HALF = (torch.float16, torch.bfloat16)
NARROWEST, WIDEST_SEM, WIDEST_GEO, WIDEST_VALUE = 16, 128, 256, 128


def decoupled_attention(q: Tensor, k_sem: Tensor, k_geo: Tensor, v: Tensor, first: Tensor | None = None) -> Tensor:
    """Return softmax(q_sem k_sem^T + q_geo k_geo^T) v, causal, with sums in at least fp32, rounded once.

    Scores are sums of two products, so the parts of a key are never concatenated, and each part has its own number of
    heads: query heads share the heads of a part in consecutive groups. Queries arrive scaled. The T queries are the
    last T of the S positions: query t has position S - T + t and sees the keys up to there, from `first` on
    (`Documents`), which is never later than its own and does not fall along T; then T = S.

    Shape: q [B, T, H, A + G], k_sem [B, S, K1, A], k_geo [B, S, K2, G], v [B, S, K3, D], first int64 [B, T]; returns
    [B, T, H, D], contiguous, in q's dtype, which all four have.

    Raises:
        ConfigError: shapes, dtypes or devices that do not fit.
    """
    check_attention(q, k_sem, k_geo, v, first)
    # Not by the op on a GPU: the dispatcher keeps a launcher that `without_kernels` has set aside.
    if (q.is_cuda or has_kernel("decoupled_attention", q)) and not has_two_part_keys(
        q.dtype, k_sem.shape[-1], k_geo.shape[-1], v.shape[-1]
    ):
        return reference_decoupled_attention(q, k_sem, k_geo, v, first)[0]
    out, _ = call_op("decoupled_attention", q, k_sem, k_geo, v, first)
    return out


def has_two_part_keys(dtype: torch.dtype, sem: int, geo: int, value: int) -> bool:
    """Whether kernels of the op take it: in 16 bits, at widths A, G and D of a head that are their tiles': powers of
    two."""
    widths = ((sem, WIDEST_SEM), (geo, WIDEST_GEO), (value, WIDEST_VALUE))
    return dtype in HALF and all(NARROWEST <= width <= widest and width & (width - 1) == 0 for width, widest in widths)


def check_attention(q: Tensor, k_sem: Tensor, k_geo: Tensor, v: Tensor, first: Tensor | None) -> None:
    """Refuse what the op does not take.

    Raises:
        ConfigError: shapes, dtypes or devices that do not fit.
    """
    op = "decoupled_attention"
    if q.dim() != 4 or not q.is_floating_point():
        raise ConfigError(f"{op}: q is {q.dtype} of shape {tuple(q.shape)}, expected floating [B, T, H, A + G]")
    batch, n_queries, heads, width = q.shape
    keys = {"k_sem": k_sem, "k_geo": k_geo, "v": v}
    n_keys = k_sem.shape[1] if k_sem.dim() == 4 else n_queries
    for name, x in keys.items():
        if x.dim() != 4 or x.shape[:2] != (batch, n_keys) or not x.shape[2] or heads % x.shape[2]:
            raise ConfigError(
                f"{op}: {name} is {tuple(x.shape)}, expected [{batch}, {n_keys}, K, width] with K heads that divide "
                f"the {heads} of q"
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise ConfigError(
                f"{op}: {name} is {x.dtype} on {x.device}, q {q.dtype} on {q.device}; expected one dtype and device"
            )
    if k_sem.shape[3] + k_geo.shape[3] != width:
        raise ConfigError(
            f"{op}: keys of {k_sem.shape[3]} + {k_geo.shape[3]} features for queries of {width}, expected as many"
        )
    if n_queries > n_keys:
        raise ConfigError(f"{op}: {n_queries} queries are the last of {n_keys} positions, expected no more of them")
    if first is None:
        return
    if first.dtype != torch.int64 or first.shape != (batch, n_queries) or first.device != q.device:
        raise ConfigError(
            f"{op}: first is {first.dtype} of shape {tuple(first.shape)} on {first.device}, expected int64 "
            f"{(batch, n_queries)} on {q.device}"
        )
    if n_queries != n_keys:
        raise ConfigError(f"{op}: first with {n_queries} queries on {n_keys} keys, expected as many of both")


def _grouped(x: Tensor, heads: int) -> Tensor:
    """Give every query head its key or value head. Shape: [B, S, K, D] -> [B, S, H, D]."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


def _summed(x: Tensor, heads: int) -> Tensor:
    """Add up what query heads say of the head that they share. Shape: [B, S, H, D] -> [B, S, K, D]."""
    return x if x.shape[2] == heads else x.unflatten(2, (heads, -1)).sum(3)


def _wide(
    q: Tensor, k_sem: Tensor, k_geo: Tensor, v: Tensor, first: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return wide queries and keys [B, ·, H, A + G], values [B, S, H, D] and masked scores [B, H, T, S]."""
    heads, n_queries, n_keys = q.shape[2], q.shape[1], k_sem.shape[1]
    keys = torch.cat((_grouped(k_sem, heads), _grouped(k_geo, heads)), dim=-1)
    queries, keys, values = upcast(q), upcast(keys), upcast(_grouped(v, heads))
    scores = torch.einsum("bthw,bshw->bhts", queries, keys)
    places = torch.arange(n_keys, device=q.device)
    hidden = places > places[n_keys - n_queries :, None]
    if first is not None:
        hidden = (hidden | (places < first[:, :, None]))[:, None]
    return queries, keys, values, scores.masked_fill(hidden, -math.inf)


def _fake_decoupled_attention(
    q: Tensor, k_sem: Tensor, k_geo: Tensor, v: Tensor, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    batch, n_queries, heads, _ = q.shape
    lse = q.new_empty((batch, heads, n_queries), dtype=torch.float32)
    return q.new_empty((batch, n_queries, heads, v.shape[3])), lse


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 5
    found = torch.ops.caramba.decoupled_attention_backward.default(grad, *ctx.saved_tensors)
    return *found, None


@caramba_op("decoupled_attention", fake=_fake_decoupled_attention, setup=_setup, backward=_backward)
def reference_decoupled_attention(
    q: Tensor, k_sem: Tensor, k_geo: Tensor, v: Tensor, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the op in plain PyTorch: what heads read, and the logarithm of the sum of exponentials of each query's
    scores, float32 [B, H, T]."""
    _, _, values, scores = _wide(q, k_sem, k_geo, v, first)
    lse = scores.detach().logsumexp(-1)
    out = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), values)
    return out.to(q.dtype).contiguous(), lse.float()


@caramba_op(
    "decoupled_attention_backward",
    fake=lambda grad, q, k_sem, k_geo, v, *_: tuple(x.new_empty(x.shape) for x in (q, k_sem, k_geo, v)),
)
def reference_decoupled_attention_backward(
    grad: Tensor,
    q: Tensor,
    k_sem: Tensor,
    k_geo: Tensor,
    v: Tensor,
    first: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k_sem, k_geo and v in plain PyTorch.

    Kernels need `out` and the float32 `lse`, to read no score twice. The reference recomputes both, to keep float64.
    """
    queries, keys, values, scores = _wide(q, k_sem, k_geo, v, first)
    grads, weights = upcast(grad), scores.softmax(-1)
    grad_v = torch.einsum("bhts,bthd->bshd", weights, grads)
    through = torch.einsum("bthd,bshd->bhts", grads, values)
    through = weights * (through - (weights * through).sum(-1, keepdim=True))
    grad_q = torch.einsum("bhts,bshw->bthw", through, keys)
    parts = torch.einsum("bhts,bthw->bshw", through, queries).split((k_sem.shape[3], k_geo.shape[3]), dim=-1)
    found = (
        grad_q,
        *(_summed(x, like.shape[2]) for x, like in zip((*parts, grad_v), (k_sem, k_geo, v), strict=True)),
    )
    grad_q, grad_sem, grad_geo, grad_v = (x.to(q.dtype).contiguous() for x in found)
    return grad_q, grad_sem, grad_geo, grad_v
