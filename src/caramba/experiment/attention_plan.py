"""Decisions of a plan about attention layers, besides the order of backends."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from caramba.config.layer import AttentionLayerConfig
from caramba.layer import documents_path, uses_split_keys_kernel
from caramba.runtime import AttentionChoice, Decision, RuntimePlan


def attention_decisions(
    made: RuntimePlan,
    layers: Sequence[AttentionLayerConfig],
    choice: AttentionChoice,
    *,
    has_documents: bool,
) -> dict[str, Decision]:
    """Return the decisions `two_part_keys` and `documents`, each if it applies.

    `two_part_keys` counts the layers whose own kernel replaces the order of `attention`; `documents` is what separates
    the documents of a row.
    """
    device, dtype = torch.device(made.value("device")), getattr(torch, made.value("dtype"))
    found: dict[str, Decision] = {}
    n_own = sum(uses_split_keys_kernel(config, device, dtype) for config in layers)
    if n_own:
        value = f"decoupled_attention in {n_own} of {len(layers)} attention layers"
        found["two_part_keys"] = Decision(value, "their keys are wider than flash and cuDNN take")
    if has_documents:
        is_compiled = bool(made.value("compile_model"))
        found["documents"] = Decision(*documents_path(device, dtype, layers, choice, is_compiled=is_compiled))
    return found
