"""Which backend of scaled_dot_product_attention runs first, by device and model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from caramba.layer import score
from caramba.runtime import AttentionChoice, choose_attention

SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@contextmanager
def attention_backends(
    device: torch.device, choice: AttentionChoice | None = None
) -> Iterator[AttentionChoice]:
    """Order the backends for models that run on `device`, as the table of `caramba tune` has it, and yield the order.

    `choice` is one that was made for the shapes of certain models; without it all shapes of the table count.
    """
    chosen = choose_attention(device) if choice is None else choice
    if chosen.order is None:
        yield chosen
        return
    before, score.TWO_WIDTHS = score.TWO_WIDTHS, chosen.keeps_two_widths
    try:
        with sdpa_kernel([SDPA[name] for name in chosen.order], set_priority=True):
            yield chosen
    finally:
        score.TWO_WIDTHS = before
