"""Tiny random models written to disk by transformers, as the references of the tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

V, M = 61, 32
BASE: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": M,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 8.0, "beta_slow": 2.0}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2_mha": ("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama31_gqa": ("Llama", {"rope_parameters": LLAMA3}),
    "llama32_tied": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama32_3b_mqa": ("Llama", {"num_key_value_heads": 1, "head_dim": 16, "rope_parameters": LLAMA3}),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama_dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "max_position_embeddings": 24}),
    "llama_yarn_mscale": ("Llama", {"rope_parameters": YARN | MSCALE}),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "tinyllama": ("Llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "num_hidden_layers": 3}),
    "smollm_tied": ("Llama", {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}),
    "mistral_window": ("Mistral", {"sliding_window": 5}),
    "mistral_full": ("Mistral", {"sliding_window": None, "head_dim": 12}),
    "qwen2": ("Qwen2", {"rms_norm_eps": 1e-6, "tie_word_embeddings": True}),
    "qwen2_yarn": ("Qwen2", {"rope_parameters": YARN, "max_position_embeddings": 64}),
    "qwen2_window": ("Qwen2", QWEN_WINDOW | {"num_hidden_layers": 3}),
    "qwen3": ("Qwen3", {"head_dim": 16, "rms_norm_eps": 1e-2}),
    "qwen3_yarn": ("Qwen3", {"head_dim": 16, "rope_parameters": YARN | {"attention_factor": 1.25}}),
    "qwen3_window": ("Qwen3", QWEN_WINDOW | {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
}  # fmt: skip


def reference(name: str, **more: Any) -> PreTrainedModel:
    """Return transformers' model of a case with random weights: biases and norms too, so that none is left out."""
    family, settings = CASES[name]
    config = getattr(transformers, f"{family}Config")(**(BASE | settings | more))
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def write(folder: Path, name: str, shard: str = "5GB", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Write a case to `folder` in `dtype` and return transformers' own reading of it in float32."""
    model = reference(name)
    kind = type(model)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
