"""Models: embedder, topology and head built from a spec, and traces of a forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from caramba.exports import lazy_exports

if TYPE_CHECKING:
    from caramba.model.custom_layers import check_causal
    from caramba.model.early_exit import EarlyExit
    from caramba.model.hf_folder import load_hf_folder
    from caramba.model.identity import model_hash
    from caramba.model.model import (
        Embedder,
        Head,
        Model,
        TiedHead,
        build_empty,
        build_model,
        build_with_random_weights,
        init_weights,
        pair_attention,
    )
    from caramba.model.pretrained import load_pretrained, save_model
    from caramba.model.trace import Trace, TraceRecord

__all__ = [
    "EarlyExit",
    "Embedder",
    "Head",
    "Model",
    "TiedHead",
    "Trace",
    "TraceRecord",
    "build_empty",
    "build_model",
    "build_with_random_weights",
    "check_causal",
    "init_weights",
    "load_hf_folder",
    "load_pretrained",
    "model_hash",
    "pair_attention",
    "save_model",
]

__getattr__ = lazy_exports(__name__, __file__)
