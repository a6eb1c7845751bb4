"""Students of multi-head latent attention as stock engines hold them: weights of a dense DeepSeek V3 or GGUF deepseek2.

Per head the engine's query is [q_h; q_h G_h], its key [A_h c; k_geo] and its value c U_h, with the score scaled by the
width of that query. So A_h, U_h and G_h are folded into its projections, and sqrt((D + Dgeo) / D) into the queries.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from caramba.config.attention import AttentionLayerConfig
from caramba.config.model import ModelSpec
from caramba.config.topology import attention_configs
from caramba.data.checkpoint.gguf_file import interleave_pairs
from caramba.data.checkpoint.hf_names import Block, llama_blocks
from caramba.data.checkpoint.shards import StoredWeights
from caramba.errors import CheckpointError, ConfigError
from caramba.export.gguf import NamedTensor, common_keys, obstacles
from caramba.export.precision import round_to
from caramba.infer.model_bundle import ModelBundle

ENGINES = ("transformers", "vllm")
TRANSFORMERS_EPS = 1e-6
"""Epsilon of the latent's norm in transformers, whatever rms_norm_eps is; vLLM, SGLang and llama.cpp take that one."""

VLLM_WIDTHS = (320, 576)
"""Latent and rotary width together for which vLLM has kernels, at commit 002d6073."""
_FOLDED = (
    "projection.q.weight",
    "projection.c.weight",
    "projection.k_geo.weight",
    "projection.c_norm.weight",
    "projection.q_sem_map",
    "projection.q_geo_map",
    "projection.v_up",
    "out.weight",
)
Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Attention:
    """One layer's weights as engines hold them; rotary pairs are neighbours.

    Shape: query [H (D + Dgeo), M], latent [R + Dgeo, M], norm [R], key_up [H, D, R], value_up [H, D, R], out [M, H D].
    """

    query: Tensor
    latent: Tensor
    norm: Tensor
    key_up: Tensor
    value_up: Tensor
    out: Tensor


def has_mla(spec: ModelSpec) -> bool:
    """Whether any layer is multi-head latent attention."""
    return any(layer.mla for layer in attention_configs(spec.topology))


def mla_blocks(spec: ModelSpec, where: str) -> tuple[Block, ...]:
    """Return the blocks of a model that engines of multi-head latent attention hold.

    Raises:
        ConfigError: another model, naming the key that no engine has and what to set before surgery.
    """
    try:
        blocks, (_, final) = llama_blocks(spec, allows_mla=True)
    except CheckpointError as error:
        raise ConfigError(f"{where}: {error}") from None
    fix = "make the student with model.surgery.target: mla (docs/export.md), or export --format hf"
    first = blocks[0].attention[1]
    for block in blocks:
        name, attention = block.attention
        if not attention.mla:
            raise ConfigError(f"{where}: {name} has {obstacles(attention)}; {fix}")
        if attention != first:
            raise ConfigError(f"{where}: {name} differs from the first block's, and engines have one width; {fix}")
        if block.feed_forward[1].bias:
            raise ConfigError(f"{where}: {block.feed_forward[0]} has bias: true, engines have none; {fix}")
        if block.feed_forward[1] != blocks[0].feed_forward[1]:
            raise ConfigError(f"{where}: {block.feed_forward[0]} differs from the first block's; {fix}")
    eps = {final.eps} | {norm.eps for block in blocks for _, norm in (block.attention_norm, block.feed_forward_norm)}
    if len(eps) > 1:
        raise ConfigError(
            f"{where}: its norms use several eps: {sorted(eps)}, engines have one; use one in the teacher"
        )
    return blocks


def fold_attention(state: Weights, block: Block, eps: float) -> Attention:
    """Return a layer's weights for an engine whose latent norm has this epsilon."""
    name, config = block.attention
    weights = {key: state[f"{name}.{key}"].detach().cpu().double() for key in _FOLDED}
    heads, width, geo = config.n_heads, config.query_dim, config.dims().rope
    query = weights["projection.q.weight"].unflatten(0, (heads, width))
    turned = weights["projection.q_geo_map"].transpose(1, 2) @ query  # [H, Dgeo, M]
    both = torch.cat((query, _neighbours(turned)), dim=1) * ((width + geo) / width) ** 0.5
    # norm(a c; a^2 eps) = norm(c; eps)
    latent = weights["projection.c.weight"] * (eps / config.latent_norm_eps) ** 0.5
    key = _neighbours(weights["projection.k_geo.weight"][None])[0]
    return Attention(
        both.flatten(0, 1),
        torch.cat((latent, key)),
        weights["projection.c_norm.weight"],
        weights["projection.q_sem_map"],
        weights["projection.v_up"].transpose(1, 2),
        weights["out.weight"],
    )


def _neighbours(rows: Tensor) -> Tensor:
    """Reorder [N, Dgeo, M] so that rotary pairs are neighbours."""
    return torch.from_numpy(interleave_pairs(rows.flatten(0, 1).numpy(), len(rows))).reshape(rows.shape)


def deepseek_config(
    spec: ModelSpec, *, max_positions: int, eos_id: int | None, dtype: str, engine: str
) -> dict[str, Any]:
    """Return the config.json of a DeepseekV3ForCausalLM without experts."""
    blocks = mla_blocks(spec, "export --format deepseek")
    attention, feed_forward = blocks[0].attention[1], blocks[0].feed_forward[1]
    dims = attention.dims()
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": spec.embedder.vocab_size,
        "hidden_size": spec.embedder.d_model,
        "intermediate_size": feed_forward.d_ff,
        "num_hidden_layers": len(blocks),
        "num_attention_heads": dims.n_heads,
        "num_key_value_heads": dims.n_heads,
        "kv_lora_rank": dims.v,
        "q_lora_rank": None,
        "qk_nope_head_dim": attention.query_dim,
        "qk_rope_head_dim": dims.rope,
        "v_head_dim": attention.query_dim,
        "rope_interleave": True,
        "rope_theta": attention.rope_base,
        "rope_scaling": None,
        "rms_norm_eps": blocks[0].attention_norm[1].eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": attention.dropout,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": spec.head.tied and engine == "transformers",
        # Every layer is dense; these describe experts that no layer has.
        "first_k_dense_replace": len(blocks),
        "moe_intermediate_size": feed_forward.d_ff,
        "moe_layer_freq": 1,
        "n_routed_experts": 1,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "dtype": dtype,
    }


def deepseek_tensors(
    spec: ModelSpec, state: Weights, engine: str, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Return every weight under its name in a DeepSeek V3 folder, in `dtype` or that of the model.

    vLLM and SGLang take the latent norm's epsilon from the other norms, and their head has a weight of its own. Only
    one layer at a time is in another dtype than that of the result.
    """
    blocks = mla_blocks(spec, "export --format deepseek")
    eps = TRANSFORMERS_EPS if engine == "transformers" else blocks[0].attention_norm[1].eps
    found: dict[str, Tensor] = {}

    def add(name: str, tensor: Tensor) -> None:
        tensor = tensor.detach().cpu()
        found[name] = tensor.to(own) if dtype is None else round_to(name, tensor, dtype)

    def copy(name: str, ours: str) -> None:
        if isinstance(state, StoredWeights) and dtype is torch.bfloat16:  # which holds whatever float32 does
            found[name] = state.read(ours, torch.bfloat16)
        else:
            add(name, state[ours])

    own = state[f"{_final_norm(spec)}.weight"].dtype
    copy("model.embed_tokens.weight", "embedder.token.weight")
    copy("model.norm.weight", f"{_final_norm(spec)}.weight")
    if not spec.head.tied:
        copy("lm_head.weight", "head.weight")
    elif engine != "transformers":
        found["lm_head.weight"] = found["model.embed_tokens.weight"].clone()
    for index, block in enumerate(blocks):
        prefix = f"model.layers.{index}."
        folded = fold_attention(state, block, eps)
        parts = {
            "self_attn.q_proj": folded.query,
            "self_attn.kv_a_proj_with_mqa": folded.latent,
            "self_attn.kv_a_layernorm": folded.norm,
            "self_attn.kv_b_proj": torch.cat((folded.key_up, folded.value_up), dim=1).flatten(0, 1),
            "self_attn.o_proj": folded.out,
        }
        for name, tensor in parts.items():
            add(f"{prefix}{name}.weight", tensor.contiguous())
        copy(f"{prefix}input_layernorm.weight", f"{block.attention_norm[0]}.weight")
        copy(f"{prefix}post_attention_layernorm.weight", f"{block.feed_forward_norm[0]}.weight")
        for name in ("gate", "up", "down"):
            copy(f"{prefix}mlp.{name}_proj.weight", f"{block.feed_forward[0]}.{name}.weight")
    return found


def vllm_note(spec: ModelSpec) -> str | None:
    """Return what to know where vLLM cannot cache a student's latent; None where it can."""
    width = mla_blocks(spec, "export --format deepseek")[0].attention[1].dims().cached
    if width in VLLM_WIDTHS:
        return None
    expected = " or ".join(map(str, VLLM_WIDTHS))
    return (
        f"vLLM caches latents of {expected} numbers a token and layer, this model has {width}: serve it with "
        "VLLM_MLA_DISABLE=1, which caches all heads (docs/export.md)"
    )


def _final_norm(spec: ModelSpec) -> str:
    return llama_blocks(spec, allows_mla=True)[1][0]


def gguf_deepseek(opened: ModelBundle) -> tuple[dict[str, Any], list[NamedTensor]]:
    """Return the metadata keys and tensors of a GGUF file of architecture deepseek2.

    The projection to the latent stays in float32: the engine's small epsilon makes its numbers too small for 16 bits.
    """
    spec = opened.model.spec
    blocks = mla_blocks(spec, "export --format gguf")
    config = deepseek_config(
        spec, max_positions=opened.max_positions, eos_id=None, dtype="float32", engine="transformers"
    )
    attention: AttentionLayerConfig = blocks[0].attention[1]
    rank, geo, width = attention.dims().v, attention.dims().rope, attention.query_dim
    keys = common_keys(config | {"head_dim": width}) | {
        "general.architecture": "deepseek2",
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": 0,
        "attention.key_length": rank + geo,
        "attention.value_length": rank,
        "attention.key_length_mla": width + geo,
        "attention.value_length_mla": width,
        "rope.dimension_count": geo,
        "leading_dense_block_count": len(blocks),
        "expert_count": 0,
        "expert_used_count": 0,
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_shared_count": 0,
        "expert_weights_scale": 1.0,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
    }
    return keys, list(_gguf_tensors(spec, opened.weights, blocks, config["rms_norm_eps"]))


def _gguf_tensors(spec: ModelSpec, state: Weights, blocks: tuple[Block, ...], eps: float) -> Iterator[NamedTensor]:
    ff = blocks[0].feed_forward[1]
    table = (spec.embedder.vocab_size, spec.embedder.d_model)
    matrices = {"gate": (ff.d_ff, ff.d_model), "up": (ff.d_ff, ff.d_model), "down": (ff.d_model, ff.d_ff)}

    def copy_of(name: str, shape: tuple[int, ...], ours: str) -> NamedTensor:
        return NamedTensor(name, shape, lambda: state[ours])

    # The parts of a layer are written one after the other.
    fold = lru_cache(maxsize=1)(lambda index: fold_attention(state, blocks[index], eps))

    def part(index: int, choose: Callable[[Attention], Tensor]) -> Callable[[], Tensor]:
        return lambda: choose(fold(index)).float()

    yield copy_of("token_embd.weight", table, "embedder.token.weight")
    yield copy_of("output_norm.weight", table[1:], f"{_final_norm(spec)}.weight")
    if not spec.head.tied:
        yield copy_of("output.weight", table, "head.weight")
    for index, block in enumerate(blocks):
        config = block.attention[1]
        heads, width, dims, m = config.n_heads, config.query_dim, config.dims(), config.d_model
        yield copy_of(f"blk.{index}.attn_norm.weight", (m,), f"{block.attention_norm[0]}.weight")
        shapes: dict[str, tuple[tuple[int, ...], Callable[[Attention], Tensor], str | None]] = {
            "attn_q": ((heads * (width + dims.rope), m), lambda found: found.query, None),
            "attn_kv_a_mqa": ((dims.cached, m), lambda found: found.latent, "f32"),
            "attn_kv_a_norm": ((dims.v,), lambda found: found.norm, None),
            "attn_k_b": ((heads, dims.v, width), lambda found: found.key_up.transpose(1, 2), None),
            "attn_v_b": ((heads, width, dims.v), lambda found: found.value_up, None),
            "attn_output": ((m, heads * width), lambda found: found.out, None),
        }
        for name, (shape, choose, keeps) in shapes.items():
            yield NamedTensor(f"blk.{index}.{name}.weight", shape, part(index, choose), keeps)
        yield copy_of(f"blk.{index}.ffn_norm.weight", (m,), f"{block.feed_forward_norm[0]}.weight")
        for name, shape in matrices.items():
            yield copy_of(f"blk.{index}.ffn_{name}.weight", shape, f"{block.feed_forward[0]}.{name}.weight")
