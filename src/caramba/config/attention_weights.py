"""The tensors of an attention layer, by its schema."""

from __future__ import annotations

from typing import TYPE_CHECKING

from caramba.config.attention_dims import AttentionMode
from caramba.config.layer_base import Shapes

if TYPE_CHECKING:
    from caramba.config.attention import AttentionLayerConfig

COPIED = ("q.weight", "q.bias", "out.weight")
"""The weights of a latent layer that surgery takes from the teacher as they are; all others are made of statistics."""


def attention_shapes(config: AttentionLayerConfig) -> Shapes:
    """Return the projections, then what `bias`, `qk_norm`, gate, temperature and null attention add.

    The latent's down projection and the output always carry a bias, which holds the means that surgery
    splits off; under `mla` neither has one.
    """
    dims, m = config.dims(), config.d_model
    heads, kv_heads = dims.n_heads, dims.n_kv_heads
    rows: dict[str, int]
    norms: Shapes = {}
    if config.is_latent:
        rows = {"q": heads * config.query_dim, "c": dims.v, "k_geo": dims.rope}
    elif config.mode is AttentionMode.DECOUPLED:
        sem, geo = dims.qk - dims.rope, dims.rope
        rows = {
            "q_sem": heads * sem,
            "q_geo": heads * geo,
            "k_sem": kv_heads * sem,
            "k_geo": kv_heads * geo,
            "v": kv_heads * dims.v,
        }
        norms = {"q_sem_norm": (sem,), "k_sem_norm": (sem,), "q_geo_norm": (geo,), "k_geo_norm": (geo,)}
        if config.tie_qk:
            del rows["k_sem"]
    else:
        rows = {"q": heads * dims.qk, "k": kv_heads * dims.qk, "v": kv_heads * dims.v}
        norms = {"q_norm": (dims.qk,), "k_norm": (dims.qk,)}
    shapes: Shapes = {f"{name}.weight": (out, m) for name, out in rows.items()}
    shapes["out.weight"] = (m, heads * config.value_dim)
    if config.is_latent:
        shapes["q_sem_map"] = (heads, config.query_dim, dims.v)
        shapes["q_geo_map"] = (heads, config.query_dim, dims.rope)
        shapes["v_up"] = (heads, dims.v, config.query_dim)
    always = ("c", "out") if config.is_latent and not config.mla else ()
    biased = rows if config.bias == "qkv" else rows | {"out": m} if config.bias else {}
    shapes |= {
        f"{name}.bias": (out,)
        for name, out in (rows | {"out": m}).items()
        if name in biased or name in always
    }
    if config.qk_norm:
        shapes |= {f"{name}.weight": shape for name, shape in norms.items()}
    if config.mla:
        shapes["c_norm.weight"] = (dims.v,)
    if config.decoupled_gate:
        shapes["gate"] = (heads,)
    if config.decoupled_gate_dynamic:
        shapes["gate_dynamic.weight"] = (heads, m)
    if config.learned_temperature:
        shapes["temperature"] = (heads,)
    if config.null_attn and config.is_latent:
        shapes |= {"null_c": (dims.v,), "null_geo": (dims.rope,)}
    elif config.null_attn:
        # One-dimensional: added once per sequence like a bias, and decayed no more than one.
        shapes |= {"null_k": (kv_heads * dims.qk,), "null_v": (kv_heads * dims.v,)}
    return shapes | first_tokens_shapes(config)


def first_tokens_shapes(config: AttentionLayerConfig) -> Shapes:
    """Return the weights of the first tokens alone.

    The value's bias holds minus the mean that surgery splits off.
    """
    if not config.exact_first_tokens:
        return {}
    width = (config.n_kv_heads or config.n_heads) * config.query_dim
    shapes: Shapes = {
        "first.k.weight": (width, config.d_model),
        "first.v.weight": (width, config.d_model),
        "first.v.bias": (width,),
        "first.key_mean": (width,),
    }
    return shapes | ({"first.k.bias": (width,)} if config.bias else {})
