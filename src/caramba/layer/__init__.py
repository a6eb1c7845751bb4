"""Layers: one torch module per file, each built from its config and called as layer(x, ctx=None)."""

from typing import TYPE_CHECKING

from caramba.exports import lazy_exports

if TYPE_CHECKING:
    from caramba.layer.attention import AttentionLayer as AttentionLayer
    from caramba.layer.decoupled import DecoupledProjection as DecoupledProjection
    from caramba.layer.documents import Documents as Documents
    from caramba.layer.documents import StoredDocuments as StoredDocuments
    from caramba.layer.dropout import DropoutLayer as DropoutLayer
    from caramba.layer.latent import LatentProjection as LatentProjection
    from caramba.layer.layer_norm import LayerNormLayer as LayerNormLayer
    from caramba.layer.linear import LinearLayer as LinearLayer
    from caramba.layer.memory_bank import MemoryBankLayer as MemoryBankLayer
    from caramba.layer.projection import StandardProjection as StandardProjection
    from caramba.layer.rms_norm import RMSNormLayer as RMSNormLayer
    from caramba.layer.rope import RotaryEmbedding as RotaryEmbedding
    from caramba.layer.rope import rope_frequencies as rope_frequencies
    from caramba.layer.rope import rotate as rotate
    from caramba.layer.rope import shared_angles as shared_angles
    from caramba.layer.score import CausalScore as CausalScore
    from caramba.layer.score import attention_backends as attention_backends
    from caramba.layer.score import packed_attention as packed_attention
    from caramba.layer.score import unplanned_attention as unplanned_attention
    from caramba.layer.swiglu import SwiGLULayer as SwiGLULayer

__getattr__ = lazy_exports(__name__, __file__)
