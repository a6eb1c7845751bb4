"""Causal attention after a prefix, by cuDNN: its statistics and outputs are corrected for the prefix.

cuDNN's backward reads the output and the log-sum-exp of the forward. Those of the whole softmax give the gradients of
the whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

ATTEND = torch.ops.aten._scaled_dot_product_cudnn_attention.default
ATTEND_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default


def prefix_attention(
    q: Tensor, k: Tensor, v: Tensor, prefix_out: Tensor, prefix_lse: Tensor
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = ATTEND(q, k, v, None, True, 0.0, True, False, scale=1.0)
    lse = lse.view(prefix_lse.shape)
    total = torch.logaddexp(lse, prefix_lse)
    share = (prefix_lse - total).exp()
    batch, heads, length, width = out.shape
    merged = q.new_empty((batch, length, heads, width)).transpose(1, 2)
    merged.copy_(torch.lerp(out.float(), prefix_out, share))
    return merged, total


def prefix_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.zeros(2, dtype=torch.int64, device=q.device)  # the state of a dropout that there is not
    seed, offset = unused[0], unused[1]
    length = q.shape[2]
    grad = _laid_out_as(out, grad)
    found = ATTEND_BACKWARD(
        grad, q, k, v, out, lse, seed, offset, None, None, None, length, length, 0.0, True, scale=1.0
    )
    grad_q, grad_k, grad_v = (_laid_out_as(like, x) for like, x in zip((q, k, v), found, strict=True))
    return grad_q, grad_k, grad_v


def _laid_out_as(like: Tensor, x: Tensor) -> Tensor:
    """Return x with the strides that the op's contract states."""
    out = torch.empty_like(like)
    return x if x.stride() == out.stride() else out.copy_(x)
