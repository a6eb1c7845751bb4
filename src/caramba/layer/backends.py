"""Order of the backends of scaled_dot_product_attention by device and model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from caramba.layer import score
from caramba.layer.varlen import find_kernel, fixed_documents, varlen_attention

if TYPE_CHECKING:
    from caramba.runtime.tuned import AttentionChoice

SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
PLAN_PAIRS = 1 << 30
"""Pairs of a query and a key from which a forward is worth a plan: cuDNN makes one for every new shape, in 80 to 100 ms
on an H200. By the rates of both there, flash loses as much at 32 rows of 6000 tokens on 16 layers of 2048 features."""


@contextmanager
def attention_backends(
    device: torch.device, choice: AttentionChoice | None = None
) -> Iterator[AttentionChoice]:
    """Order SDPA backends for models on `device` by the table of `caramba tune`; yield the order.

    `choice` restricts the table to the shapes of given models; without it all its shapes count. Documents of a packed
    row use a variable-length kernel if the device has one and the choice selects it.
    """
    if choice is None:
        from caramba.runtime.tuned import choose_attention  # not for a decode loop, which has no table

        choice = choose_attention(device)
    chosen = choice
    kernel = find_kernel(device) if chosen.uses_varlen else None
    with varlen_attention(None if isinstance(kernel, str) else kernel):
        if chosen.order is None:
            yield chosen
            return
        before, score.TWO_WIDTHS = score.TWO_WIDTHS, chosen.keeps_two_widths
        try:
            with sdpa_kernel([SDPA[name] for name in chosen.order], set_priority=True):
                yield chosen
        finally:
            score.TWO_WIDTHS = before


@contextmanager
def unplanned_attention(device: torch.device, n_pairs: int) -> Iterator[None]:
    """Prefer SDPA backends without per-shape plans, for prefill and growing caches.

    Torch picks cuDNN on Hopper and later. It builds a plan for every new shape, which takes longer than the forward of
    a prompt. The order does not change if `n_pairs`, the query-key pairs of a call, is large, on other devices, or if
    neither flash nor efficient is enabled. Disabled backends stay disabled. Blocks of several threads may overlap.
    """
    if device.type != "cuda" or n_pairs >= PLAN_PAIRS:
        yield
        return
    _unplanned.enter_block()
    try:
        yield
    finally:
        _unplanned.exit_block()


@contextmanager
def packed_attention(device: torch.device, n_tokens: int) -> Iterator[None]:
    """Run packed prefill: one row of `n_tokens` tokens that concatenates a fixed number of prompts.

    Attention uses a variable-length kernel if the device has one, otherwise a mask and backends without plans.
    """
    with torch.inference_mode(False):  # the kernel is checked once, with gradients
        kernel = find_kernel(device)
    with (
        unplanned_attention(device, n_tokens**2),
        fixed_documents(None if isinstance(kernel, str) else kernel),
    ):
        yield


class _Unplanned:
    """The order of `unplanned_attention`, which is the whole process's: the first block to begin sets it, in whichever
    thread, and the last to end brings back what was before."""

    def __init__(self) -> None:
        self._lock, self._n_blocks, self._order = threading.Lock(), 0, ExitStack()

    def enter_block(self) -> None:
        with self._lock:
            if self._n_blocks == 0:
                self._set()
            self._n_blocks += 1

    def exit_block(self) -> None:
        with self._lock:
            self._n_blocks -= 1
            if self._n_blocks == 0:
                self._order.close()

    def _set(self) -> None:
        backends = torch.backends.cuda
        flash, efficient = backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled()
        if not (flash or efficient):  # math alone would be slower than any plan
            return
        enabled = {"flash": flash, "efficient": efficient, "math": backends.math_sdp_enabled()}
        order = [SDPA[name] for name, is_on in enabled.items() if is_on]
        self._order.enter_context(sdpa_kernel(order, set_priority=True))
        self._order.callback(setattr, score, "TWO_WIDTHS", score.TWO_WIDTHS)
        score.TWO_WIDTHS = False  # flash takes one width


_unplanned = _Unplanned()
