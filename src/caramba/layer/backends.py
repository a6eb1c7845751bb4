"""Which backend of scaled_dot_product_attention runs first, by device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from caramba.layer import score
from caramba.runtime import prefers_cudnn

CUDNN_FIRST = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


@contextmanager
def attention_backends(device: torch.device) -> Iterator[None]:
    """Order the backends for models that run on `device`, where torch's own order is not the fastest."""
    if not prefers_cudnn(device):
        yield
        return
    before, score.TWO_WIDTHS = score.TWO_WIDTHS, True
    try:
        with sdpa_kernel(list(CUDNN_FIRST), set_priority=True):
            yield
    finally:
        score.TWO_WIDTHS = before
