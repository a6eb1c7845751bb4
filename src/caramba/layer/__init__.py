"""Layers: one torch module per file, each built from its config and called as layer(x, ctx=None)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from caramba.exports import lazy_exports

if TYPE_CHECKING:
    from caramba.layer.attention import AttentionLayer
    from caramba.layer.decoupled import DecoupledProjection
    from caramba.layer.documents import Documents, StoredDocuments
    from caramba.layer.dropout import DropoutLayer
    from caramba.layer.latent import LatentProjection
    from caramba.layer.layer_norm import LayerNormLayer
    from caramba.layer.linear import LinearLayer
    from caramba.layer.memory_bank import MemoryBankLayer
    from caramba.layer.projection import Projection, StandardProjection
    from caramba.layer.rms_norm import RMSNormLayer
    from caramba.layer.rope import RotaryEmbedding, rope_frequencies, rotate, shared_angles
    from caramba.layer.score import (
        CausalScore,
        attention_backends,
        packed_attention,
        unplanned_attention,
    )
    from caramba.layer.swiglu import SwiGLULayer

__all__ = [
    "AttentionLayer",
    "CausalScore",
    "DecoupledProjection",
    "Documents",
    "DropoutLayer",
    "LatentProjection",
    "LayerNormLayer",
    "LinearLayer",
    "MemoryBankLayer",
    "Projection",
    "RMSNormLayer",
    "RotaryEmbedding",
    "StandardProjection",
    "StoredDocuments",
    "SwiGLULayer",
    "attention_backends",
    "packed_attention",
    "rope_frequencies",
    "rotate",
    "shared_angles",
    "unplanned_attention",
]

__getattr__ = lazy_exports(__name__, __file__)
