"""Causal attention joined with a known part, by cuDNN or flash attention: their outputs and statistics are corrected.

Both backwards read the output and the log-sum-exp of the forward. Those of the whole softmax give the gradients of
the whole. Windows, documents, grouped heads and fewer queries than keys are flash attention's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ATTEND = torch.ops.aten._scaled_dot_product_cudnn_attention.default
ATTEND_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
FLASH = torch.ops.aten._flash_attention_forward.default
FLASH_BACKWARD = torch.ops.aten._flash_attention_backward.default
WIDEST, STEP = 128, 8
"""Features of a head that cuDNN takes, and what they are a multiple of."""


def prefix_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_out: Tensor,
    prefix_lse: Tensor,
    window: int | None,
    first: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if _is_plain(q, k, v, window, first):
        out, lse, *_ = ATTEND(q, k, v, None, True, 0.0, True, False, scale=1.0)
    else:
        rows = _Rows(q, k, v, window, first)
        out, lse, *_ = FLASH(*rows.of(q, k, v), *rows.bounds, 0.0, False, False, **rows.options)
        out, lse = rows.by_head(out, v), rows.statistics(lse)
    lse = lse.view(prefix_lse.shape)
    total = torch.logaddexp(lse, prefix_lse)
    share = (prefix_lse - total).exp()
    batch, heads, length, width = out.shape
    merged = q.new_empty((batch, length, heads, width)).transpose(1, 2)
    if prefix_out.dtype == out.dtype:
        torch.lerp(out, prefix_out, share.to(out.dtype), out=merged)
    else:
        merged.copy_(torch.lerp(out.float(), prefix_out, share))
    return merged, total


def prefix_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    window: int | None,
    first: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    # The state of a dropout that there is not.
    unused = torch.zeros(2, dtype=torch.int64, device=q.device)
    if _is_plain(q, k, v, window, first):
        length = q.shape[2]
        given = (_laid_out_as(out, grad), q, k, v, out, lse, unused[0], unused[1], None, None, None)
        found = ATTEND_BACKWARD(*given, length, length, 0.0, True, scale=1.0)
    else:
        rows = _Rows(q, k, v, window, first)
        total = lse.view(lse.shape[:3])
        if first is not None:
            total = total.transpose(0, 1).flatten(1)  # [H, B * T]
        tensors = *rows.of(grad, q, k, v, out), total.contiguous()
        found = FLASH_BACKWARD(*tensors, *rows.bounds, 0.0, False, unused, unused, **rows.options)
        found = [rows.by_head(x, like) for x, like in zip(found, (q, k, v), strict=True)]
    grad_q, grad_k, grad_v = (_laid_out_as(like, x) for like, x in zip((q, k, v), found, strict=True))
    return grad_q, grad_k, grad_v


class _Rows:
    """Tensors as flash attention takes them: [B, T, H, D], or [B * T, H, D] of documents, in one width.

    The narrower of keys and values is padded with zeros, which change neither the scores nor the features returned.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, window: int | None, first: Tensor | None) -> None:
        width = max(q.shape[-1], v.shape[-1])
        self.width, self.shape, self.is_packed = width + -width % STEP, k.shape[:3:2], first is not None
        starts = None if first is None else _starts(first)
        self.bounds = (starts, starts, q.shape[2], k.shape[2])
        self.options: dict[str, Any] = {
            "scale": 1.0,
            "window_size_left": -1 if window is None else window - 1,
            "window_size_right": 0,
        }

    def of(self, *tensors: Tensor) -> list[Tensor]:
        rows = [_aligned(x, self.width).transpose(1, 2) for x in tensors]
        return [x.flatten(0, 1) for x in rows] if self.is_packed else rows

    def by_head(self, x: Tensor, like: Tensor) -> Tensor:
        """Return [B, H, T, D] of rows, as wide as `like`."""
        x = x[..., : like.shape[-1]]
        return (x.unflatten(0, self.shape) if self.is_packed else x).transpose(1, 2)

    def statistics(self, lse: Tensor) -> Tensor:
        """Return [B, H, T] of what the forward returns."""
        return lse.unflatten(1, self.shape).transpose(0, 1).contiguous() if self.is_packed else lse


def _starts(first: Tensor) -> Tensor:
    """Return where documents begin in all rows, and the number of tokens, int32 [N + 1]; the host waits for N."""
    begins = first == torch.arange(first.shape[1], device=first.device)
    return F.pad(begins.flatten().nonzero().flatten(), (0, 1), value=first.numel()).to(torch.int32)


def _aligned(x: Tensor, width: int) -> Tensor:
    """Return x of `width` features whose rows can be loaded 16 bytes at once."""
    if x.shape[-1] < width:
        return F.pad(x, (0, width - x.shape[-1]))
    places = (x.storage_offset(), *x.stride()[:-1])
    is_aligned = x.stride(-1) == 1 and not any(place % STEP for place in places)
    return x if is_aligned else x.clone(memory_format=torch.contiguous_format)


def _is_plain(q: Tensor, k: Tensor, v: Tensor, window: int | None, first: Tensor | None) -> bool:
    """True for whole causal sequences, a key/value head to each query head: cuDNN is the faster one."""
    is_whole = window is None and first is None and q.shape[:3] == k.shape[:3]
    return is_whole and all(x.shape[-1] <= WIDEST and x.shape[-1] % STEP == 0 for x in (q, v))


def _laid_out_as(like: Tensor, x: Tensor) -> Tensor:
    """Return x with the strides that the op's contract states."""
    out = torch.empty_like(like)
    return x if x.stride() == out.stride() else out.copy_(x)
