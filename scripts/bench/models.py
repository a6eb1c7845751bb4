"""Models of random weights, and the bytes that a decode step of each has to read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from caramba.config.estimate import model_cost
from caramba.config.kvcache import KVCacheKind
from caramba.config.model import ModelSpec
from caramba.model import Model, build_with_random_weights
from caramba.model.model import model_bytes

# d_model, blocks, heads, key/value heads, d_ff, vocabulary: SmolLM2 135M's and Llama 3.2 1B's.
SIZES = {
    "135m": (576, 30, 9, 3, 1536, 49152),
    "1b": (2048, 16, 32, 8, 8192, 128256),
    "tiny": (64, 2, 4, 2, 128, 128),
}
SCALING = {
    "type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


LATENT = {"mode": "decoupled", "layout": "latent", "sem_dim": 128}
LAYOUTS: dict[str, dict[str, Any]] = {
    "gqa": {"mode": "gqa"},
    "llama32_dba": LATENT | {"geo_dim": 256},
    "llama32_dba_384b": LATENT | {"geo_dim": 64},
}


def llama_spec(size: str, attention: dict[str, Any], blocks: int | None = None) -> dict[str, Any]:
    """Return the model key of a manifest with a size's blocks, or fewer, and this attention in each."""
    d_model, n_blocks, n_heads, n_kv_heads, d_ff, vocab = SIZES[size]
    norm = {"type": "RMSNormLayer", "d_model": d_model}
    heads = {"d_model": d_model, "n_heads": n_heads, "n_kv_heads": n_kv_heads}
    mlp = {"type": "SwiGLULayer", "d_model": d_model, "d_ff": d_ff}
    block = [{"type": "ResidualTopology", "layers": [norm, layer]} for layer in (heads | attention, mlp)]
    nested = {"type": "NestedTopology", "layers": block, "repeat": blocks or n_blocks}
    return {
        "type": "TransformerModel",
        "embedder": {"vocab_size": vocab, "d_model": d_model},
        "topology": {"type": "StackedTopology", "layers": [nested, norm]},
        "head": {"tied": True},
    }


def model_of(size: str, layout: str, device: torch.device) -> Model:
    """Return a model of random weights, bfloat16 on a GPU: speed does not depend on the text."""
    rope = {"rope_base": 500000.0, "rope_scaling": SCALING}
    spec = llama_spec(size, {"type": "AttentionLayer", **rope, **LAYOUTS[layout]})
    model = build_with_random_weights(ModelSpec.model_validate(spec), device)
    return model.to(torch.bfloat16 if device.type == "cuda" else torch.float32).eval()


def prompts_of(model: Model, batch: int, length: int) -> list[list[int]]:
    """Return the same random prompts at every call."""
    source = torch.Generator().manual_seed(0)
    return torch.randint(model.spec.embedder.vocab_size, (batch, length), generator=source).tolist()


def cache_kind(device: torch.device) -> KVCacheKind:
    """Return the 16-bit kind of a GPU, fp32 elsewhere."""
    return KVCacheKind.BF16 if device.type == "cuda" else KVCacheKind.FP32


def bytes_of_step(model: Model, batch: int, context: int, kind: KVCacheKind) -> float:
    """Return what a step reads at least: every weight once (a tied embedding is the head), and the cache's tokens."""
    return model_bytes(model) + batch * context * float(model_cost(model.spec).kv_bytes_per_token(kind))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate features p and p + D/2 by the angles in plain torch, in at least float32. Shape: [..., T, D], [T, D/2]."""
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
