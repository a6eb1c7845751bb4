"""Plain Llama-shaped models as a stock LlamaForCausalLM, or as a Qwen2ForCausalLM where only q, k and v have biases:
the configuration, and the tensors under their names there."""

from typing import Any

from torch import Tensor

from caramba.config.layer import AttentionLayerConfig
from caramba.config.layer_base import LayerConfig, RopeScalingConfig
from caramba.config.model import ModelSpec
from caramba.data.checkpoint.hf_names import hf_names, llama_blocks
from caramba.errors import CheckpointError
from caramba.model import Model

# What a Llama layer has a setting for; everything else has to be at its default. Dropout is inactive in inference.
_ATTENTION_KEYS = frozenset(
    {"d_model", "n_heads", "n_kv_heads", "head_dim", "mode", "rope_base", "rope_scaling", "bias", "dropout"}
)
_SCALING_KEYS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
}


def why_not_llama(spec: ModelSpec) -> str | None:
    """Return what keeps a model from being a stock Llama, or None when nothing does."""
    try:
        blocks, (_, final) = llama_blocks(spec)
        hf_names(spec)
    except CheckpointError as error:
        return str(error)
    first = blocks[0]
    norms = {final.eps, *(block.attention_norm[1].eps for block in blocks)}
    norms |= {block.feed_forward_norm[1].eps for block in blocks}
    if len(norms) > 1:
        return f"its norms use several eps: {sorted(norms)}"
    for block in blocks:
        for (name, layer), (_, other) in (
            (block.attention, first.attention),
            (block.feed_forward, first.feed_forward),
        ):
            if layer != other:
                return f"{name} differs from the first block's"
    attention = first.attention[1]
    if attention.bias == "qkv" and first.feed_forward[1].bias:
        return "its attention has biases on q, k and v alone and its SwiGLU has biases, and no stock model has both"
    for key, field in type(attention).model_fields.items():
        is_free = key in _ATTENTION_KEYS or key in LayerConfig.model_fields
        if not is_free and getattr(attention, key) != field.get_default(call_default_factory=True):
            return f"its attention has {key}={getattr(attention, key)}"
    return None


def llama_config(spec: ModelSpec, *, max_positions: int, eos_id: int | None, dtype: str) -> dict[str, Any]:
    """Return the content of config.json, in the keys that transformers 4 and 5 both read."""
    blocks, (_, final) = llama_blocks(spec)
    attention, feed_forward = blocks[0].attention[1], blocks[0].feed_forward[1]
    dims = attention.dims()
    family: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    family |= {"attention_bias": attention.bias, "mlp_bias": feed_forward.bias}
    if attention.bias == "qkv":  # what every Qwen 2 has, without a key for it
        family = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}
    return {
        **family,
        "vocab_size": spec.embedder.vocab_size,
        "hidden_size": spec.embedder.d_model,
        "intermediate_size": feed_forward.d_ff,
        "num_hidden_layers": len(blocks),
        "num_attention_heads": dims.n_heads,
        "num_key_value_heads": dims.n_kv_heads,
        "head_dim": dims.qk,
        "hidden_act": "silu",
        "max_position_embeddings": _positions(attention.rope_scaling, max_positions),
        "rms_norm_eps": final.eps,
        "rope_theta": attention.rope_base,
        "rope_scaling": _scaling(attention),
        "attention_dropout": attention.dropout,
        "tie_word_embeddings": spec.head.tied,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "dtype": dtype,
    }


def llama_tensors(model: Model) -> dict[str, Tensor]:
    """Return every weight under its Hugging Face name; a tied head has none of its own.

    Raises:
        CheckpointError: the model is of another shape than a Llama.
    """
    state = model.state_dict()
    return {theirs: state[ours].detach().cpu() for ours, theirs in hf_names(model.spec).items()}


def _positions(scaling: RopeScalingConfig | None, max_positions: int) -> int:
    """Return the length for config.json; two scalings are defined by it.

    Under `dynamic` it is where the frequencies begin to change, under `yarn` the length that they were scaled for.
    """
    if scaling is not None and scaling.type == "dynamic":
        return scaling.original_max_position_embeddings
    if scaling is not None and scaling.type == "yarn":
        return round(scaling.factor * scaling.original_max_position_embeddings)
    return max_positions


def _scaling(attention: AttentionLayerConfig) -> dict[str, Any] | None:
    scaling: RopeScalingConfig | None = attention.rope_scaling
    if scaling is None:
        return None
    values = {key: getattr(scaling, key) for key in _SCALING_KEYS[scaling.type]}
    return {"rope_type": scaling.type, **{key: value for key, value in values.items() if value is not None}}
