"""How packed documents are separated in training, and why: by which kernel, or by a mask."""

from collections.abc import Iterable, Sequence

import torch

from caramba.config.layer import AttentionLayerConfig
from caramba.layer.score import WIDEST, find_kernel
from caramba.lower.split_keys import OP, uses_split_keys_kernel
from caramba.runtime import AttentionChoice


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
    masked = [why for why in (_needs_mask(config, "window_size" in kernel.takes) for config in configs) if why]
    if masked:
        reasons = ", ".join(dict.fromkeys(masked))
        value = "mask" if len(masked) == len(configs) else "varlen, mask"
        return value, f"{len(masked)} of {len(configs)} attention layers need the mask: {reasons}"
    return "varlen", "varlen_attn gave the numbers of the mask on this device"


def _needs_mask(config: AttentionLayerConfig, has_window: bool) -> str:
    """Return why a layer needs the mask, empty if a variable-length kernel supports it."""
    dims = config.dims()
    width = max(dims.qk, dims.v)
    # The expanded form, as in `latent.expanding_is_cheaper`.
    if config.is_latent and dims.v > config.query_dim:
        width = config.query_dim + dims.rope
    found = {
        "null_attn": config.null_attn,
        "exact_first_tokens": dims.first_tokens > 0,
        f"dropout {config.dropout:g}": config.dropout > 0,
        f"{width} features, over {WIDEST}": width > WIDEST,
        "local_window": config.local_window is not None and not has_window,
    }
    return ", ".join(reason for reason, holds in found.items() if holds)
