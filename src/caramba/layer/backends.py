"""Order of the backends of scaled_dot_product_attention by device and model, and how packed documents are separated."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from caramba.config.layer import AttentionLayerConfig
from caramba.layer import score
from caramba.layer.split_keys import OP, uses_split_keys_kernel
from caramba.layer.varlen import WIDEST, find_kernel, fixed_documents, varlen_attention
from caramba.runtime import AttentionChoice, choose_attention

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
    chosen = choose_attention(device) if choice is None else choice
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


def documents_path(
    device: torch.device,
    dtype: torch.dtype,
    layers: Iterable[AttentionLayerConfig],
    choice: AttentionChoice,
    *,
    is_compiled: bool = False,
) -> tuple[str, str]:
    """Return how packed documents are separated in training, and why.

    The first value is `decoupled_attention`, `varlen`, `mask` or several of them.
    """
    configs = list(layers)
    others = [config for config in configs if not uses_split_keys_kernel(config, device, dtype)]
    n_own, why = len(configs) - len(others), "decoupled_attention takes the first key of every query"
    if n_own and not others:
        return OP, why
    value, reason = _path(device, dtype, others, choice, is_compiled=is_compiled)
    if not n_own:
        return value, reason
    return f"{OP}, {value}", f"{n_own} of {len(configs)} attention layers: {why}; the others: {reason}"


def _path(
    device: torch.device,
    dtype: torch.dtype,
    configs: Sequence[AttentionLayerConfig],
    choice: AttentionChoice,
    *,
    is_compiled: bool,
) -> tuple[str, str]:
    """Return how documents are separated in layers without split keys, `varlen` or `mask`, and why."""
    kernel = find_kernel(device)
    if isinstance(kernel, str):
        return "mask", kernel
    if not choice.uses_varlen:
        return "mask", f"varlen_attn is slower: {choice.source}"
    if dtype not in kernel.dtypes:
        return "mask", f"varlen_attn takes 16 bits, not {str(dtype).removeprefix('torch.')}"
    if is_compiled:
        return "mask", "compile_model: the shapes of a graph do not follow the documents of a batch"
    masked = [
        why for why in (_needs_mask(config, "window_size" in kernel.takes) for config in configs) if why
    ]
    if masked:
        reasons = ", ".join(dict.fromkeys(masked))
        value = "mask" if len(masked) == len(configs) else "varlen, mask"
        return value, f"{len(masked)} of {len(configs)} attention layers need the mask: {reasons}"
    return "varlen", "varlen_attn gave the numbers of the mask on this device"


def _needs_mask(config: AttentionLayerConfig, has_window: bool) -> str:
    """Return why a layer needs the mask, empty if a variable-length kernel supports it."""
    dims = config.dims()
    width = max(dims.qk, dims.v)
    if (
        config.is_latent and dims.v > config.query_dim
    ):  # the expanded form, as in `latent.expanding_is_cheaper`
        width = config.query_dim + dims.rope
    found = {
        "null_attn": config.null_attn,
        "exact_first_tokens": dims.first_tokens > 0,
        f"dropout {config.dropout:g}": config.dropout > 0,
        f"{width} features, over {WIDEST}": width > WIDEST,
        "local_window": config.local_window is not None and not has_window,
    }
    return ", ".join(reason for reason, holds in found.items() if holds)
