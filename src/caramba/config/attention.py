"""Schema of attention: its fields, the rules between them, and the widths that follow."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, model_validator

from caramba.config.attention_dims import (
    FUSED_WIDEST,
    PART_NARROWEST,
    PART_WIDEST,
    AttentionDims,
    AttentionMode,
    align_width,
)
from caramba.config.base import Probability
from caramba.config.cost import AttentionWork, Cost, Width, expect_width, layer_cost
from caramba.config.extension import TYPE
from caramba.config.kvcache import CacheFormat
from caramba.config.layer_base import Dimension, LayerConfig, RopeScalingConfig, Shapes
from caramba.errors import member


def _mode(value: Any) -> Any:
    return member(AttentionMode, value.lower()) if isinstance(value, str) else value


class AttentionLayerConfig(LayerConfig):
    """Self-attention in four modes. `sem_dim`, `geo_dim`, `v_dim` are cached widths of all heads together.

    Under `layout: latent` all heads read one latent, `sem_dim` wide, as semantic key and value, so `n_kv_heads` has
    no effect there but on the first tokens; `head_dim` is the width of each query before the maps into the latent.
    `exact_first_tokens` of a sequence, or document, are read through keys and values of `n_kv_heads` heads instead,
    `head_dim` wide, which are cached at full precision: a constant per sequence, no bytes per token.

    `null_attn` learns a key and a value per key/value head that every query may attend to, under `latent` one
    latent and one geometric key; `rope_semantic` rotates
    the semantic path as well as the geometric one; `q_chunk` attends from that many queries at a time.
    """

    target = "caramba.layer.attention:AttentionLayer"

    type: Literal["AttentionLayer"] = Field(default="AttentionLayer", description=TYPE)
    d_model: Dimension = Field(description="width of the residual stream")
    n_heads: Dimension = Field(description="number of query heads")
    n_kv_heads: Dimension | None = Field(default=None, description="number of key/value heads; unset: n_heads")
    head_dim: Dimension | None = Field(default=None, description="width of a head; unset: d_model / n_heads")
    mode: Annotated[AttentionMode, BeforeValidator(_mode)] = Field(
        default=AttentionMode.STANDARD,
        description="standard, gqa (fewer key/value heads), decoupled (semantic and geometric keys) or "
        "bottleneck (one narrow width)",
    )
    layout: Literal["per_head", "latent"] = Field(
        default="per_head",
        description="mode=decoupled: per_head caches keys and values of each head, latent one shared latent",
    )
    sem_dim: Dimension | None = Field(
        default=None, description="mode=decoupled: cached width of the semantic keys, all heads together"
    )
    geo_dim: Dimension | None = Field(
        default=None, description="mode=decoupled: cached width of the geometric keys, all heads together"
    )
    v_dim: Dimension | None = Field(
        default=None,
        description="mode=decoupled: cached width of the values, all heads together; unset: head_dim per head",
    )
    attn_dim: Dimension | None = Field(
        default=None, description="mode=bottleneck: width of queries, keys and values, all heads together"
    )
    rope_enabled: bool = Field(default=True, description="whether rotary position embeddings are applied")
    rope_base: PositiveFloat = Field(default=10000.0, description="base of the rotary frequencies")
    rope_scaling: RopeScalingConfig | None = Field(
        default=None, description="rescaling of the rotary frequencies for longer contexts; unset: none"
    )
    rope_semantic: bool = Field(
        default=False, description="mode=decoupled: whether the semantic path is rotated as well"
    )
    decoupled_gate: bool = Field(
        default=False,
        description="mode=decoupled: whether a learned gate per head weighs the semantic against the geometric scores",
    )
    decoupled_gate_dynamic: bool = Field(
        default=False,
        description="mode=decoupled: whether the gate also depends on the input; needs decoupled_gate",
    )
    tie_qk: bool = Field(
        default=False,
        description="mode=decoupled: whether semantic keys use the weights of the queries; needs n_kv_heads = n_heads",
    )
    exact_first_tokens: NonNegativeInt = Field(
        default=0,
        description="layout=latent: number of first tokens with full keys and values at full precision",
    )
    cache_format: CacheFormat | None = Field(
        default=None,
        description="quantised format that keys and values are rounded to as a cache stores them: q8_0, q4_0, nf4 or "
        "mixed (q8_0 for k_geo, q4_0 else); null rounds nothing",
    )
    mla: bool = Field(
        default=False,
        description="layout=latent: multi-head latent attention as stock engines have it: an RMS norm on the latent, "
        "standard rotary frequencies, no biases",
    )
    latent_norm_eps: PositiveFloat = Field(
        default=100.0,
        description="mla: epsilon of the latent's norm; far above the latent's mean square the norm is nearly linear",
    )
    null_attn: bool = Field(
        default=False, description="whether a learned key and value are added that every query may attend to"
    )
    learned_temperature: bool = Field(
        default=False, description="whether the scale of the attention scores is learned per head"
    )
    local_window: Dimension | None = Field(
        default=None, description="number of last tokens that a query attends to; unset: all"
    )
    q_chunk: Dimension | None = Field(
        default=None, description="number of queries that attend in one step; the result is equal; unset: all"
    )
    bias: bool | Literal["qkv"] = Field(
        default=False, description="true: all projections; qkv: queries, keys and values, not the output"
    )
    qk_norm: bool = Field(default=False, description="whether RMS normalisation is applied to queries and keys")
    qk_norm_eps: PositiveFloat = Field(default=1e-6, description="epsilon of qk_norm")
    dropout: Probability = Field(default=0.0, description="dropout probability of the attention weights")

    _decoupled_only: ClassVar[tuple[str, ...]] = (
        *("sem_dim", "geo_dim", "v_dim", "decoupled_gate", "decoupled_gate_dynamic", "tie_qk"),
        *("rope_semantic", "exact_first_tokens", "mla"),
    )
    _not_in_mla: ClassVar[tuple[str, ...]] = (
        *("null_attn", "exact_first_tokens", "local_window", "decoupled_gate", "learned_temperature"),
        *("bias", "rope_scaling"),
    )

    @model_validator(mode="after")
    def _rules(self) -> AttentionLayerConfig:
        kv_heads = self.n_kv_heads or self.n_heads
        if (
            self.head_dim is None
            and self.mode in (AttentionMode.STANDARD, AttentionMode.GQA)
            and self.d_model % self.n_heads
        ):
            raise ValueError(
                f"n_heads={self.n_heads} does not divide d_model={self.d_model}; use a divisor of "
                f"{self.d_model}, or set head_dim"
            )
        if self.n_heads % kv_heads:
            raise ValueError(
                f"n_kv_heads={kv_heads} does not divide n_heads={self.n_heads}; use a divisor of {self.n_heads}"
            )
        if self.mode is AttentionMode.STANDARD and kv_heads != self.n_heads:
            raise ValueError(
                f"mode=standard has as many key/value heads as heads ({self.n_heads}), got "
                f"n_kv_heads={kv_heads}; use mode=gqa"
            )
        if self.mode is AttentionMode.BOTTLENECK:
            if self.attn_dim is None:
                raise ValueError("mode=bottleneck needs attn_dim, the narrow width of queries, keys and values")
            if self.attn_dim % self.n_heads:
                raise ValueError(
                    f"n_heads={self.n_heads} does not divide attn_dim={self.attn_dim}; use a multiple of {self.n_heads}"
                )
        elif self.attn_dim is not None:
            raise ValueError(f"attn_dim belongs to mode=bottleneck, got mode={self.mode}; remove it")
        if self.mode is AttentionMode.DECOUPLED:
            self._decoupled_rules(kv_heads)
        else:
            foreign = [name for name in self._decoupled_only if getattr(self, name)]
            if foreign or self.layout != "per_head":
                raise ValueError(
                    f"{(foreign or ['layout'])[0]} belongs to mode=decoupled, got mode={self.mode}; remove "
                    "it or set mode: decoupled"
                )
        dims = self.dims()
        if self.rope_enabled and dims.rope % 2:
            raise ValueError(self._uneven(dims))
        if self.rope_scaling is not None and not self.rope_enabled:
            raise ValueError("rope_scaling is set while rope_enabled is false; enable RoPE or remove the scaling")
        return self

    def _decoupled_rules(self, kv_heads: int) -> None:
        if self.sem_dim is None or self.geo_dim is None:
            raise ValueError("mode=decoupled needs sem_dim and geo_dim, the cached widths of the two paths")
        if self.rope_semantic and not self.rope_enabled:
            raise ValueError("rope_semantic is set while rope_enabled is false; enable RoPE or remove rope_semantic")
        if self.decoupled_gate_dynamic and not self.decoupled_gate:
            raise ValueError("decoupled_gate_dynamic needs decoupled_gate: true")
        if self.mla:
            self._mla_rules()
        if self.layout == "latent":
            refused = [name for name in ("rope_semantic", "tie_qk", "v_dim", "qk_norm") if getattr(self, name)]
            if refused:
                raise ValueError(
                    f"{refused[0]} is not defined for layout=latent, where one latent is key and value; "
                    "remove it or use layout: per_head"
                )
            if self.head_dim is None and self.d_model % self.n_heads:
                raise ValueError(
                    f"n_heads={self.n_heads} does not divide d_model={self.d_model}; set head_dim, the "
                    "width of each query"
                )
            if self.exact_first_tokens:
                self._first_tokens_rules()
            return
        if self.exact_first_tokens:
            raise ValueError(
                f"exact_first_tokens={self.exact_first_tokens} belongs to layout=latent, got "
                f"layout={self.layout}; remove it or use layout: latent"
            )
        if self.tie_qk and kv_heads != self.n_heads:
            raise ValueError(
                f"tie_qk needs one key head per query head ({self.n_heads}), got n_kv_heads={kv_heads}; set "
                f"n_kv_heads: {self.n_heads}"
            )
        for name in ("sem_dim", "geo_dim", "v_dim"):
            width = getattr(self, name)
            if width is not None and width % kv_heads:
                raise ValueError(
                    f"{name}={width} is not a multiple of the {kv_heads} key/value heads; use a multiple of {kv_heads}"
                )
        if self.rope_semantic and self.sem_dim // kv_heads % 2:
            raise ValueError(
                f"rope_semantic rotates the semantic path, which needs an even width per head, got "
                f"{self.sem_dim // kv_heads}; change sem_dim or the head count"
            )
        if self.v_dim is None and self.head_dim is None and self.d_model % self.n_heads:
            raise ValueError(f"n_heads={self.n_heads} does not divide d_model={self.d_model}; set v_dim or head_dim")

    def _mla_rules(self) -> None:
        """Refuse what multi-head latent attention of stock engines does not have."""
        fix = "; set it before surgery, or use surgery.target: caramba (mla: false)"
        if self.layout != "latent":
            raise ValueError(f"mla needs layout: latent, got layout={self.layout}{fix}")
        if not self.rope_enabled:
            raise ValueError(f"mla needs rope_enabled: true, its shared key is rotary{fix}")
        for name, (value, neutral) in self.outside_mla().items():
            raise ValueError(
                f"{name}={value} is not part of multi-head latent attention (mla: true), no engine could hold it: "
                f"set {name}: {neutral}{fix}"
            )

    def outside_mla(self) -> dict[str, tuple[Any, str]]:
        """Return each key that multi-head latent attention lacks: its value here, and the one to set."""
        neutral = {"exact_first_tokens": "0", "local_window": "null", "rope_scaling": "null"}
        found = {name: (getattr(self, name), neutral.get(name, "false")) for name in self._not_in_mla}
        return {name: item for name, item in found.items() if item[0]}

    def _first_tokens_rules(self) -> None:
        reasons = {
            "local_window": "a query would see tokens that its window hides",
            "null_attn": "one row precedes the tokens already, that of the first ones",
            "dropout": "the first tokens' probabilities would be dropped together",
        }
        for name, reason in reasons.items():
            if getattr(self, name):
                raise ValueError(
                    f"{name}={getattr(self, name)} is not defined with exact_first_tokens="
                    f"{self.exact_first_tokens}: {reason}; set exact_first_tokens: 0 or remove {name}"
                )
        width = self.head_dim or self.d_model // self.n_heads
        if self.rope_enabled and width % 2:
            raise ValueError(
                f"exact_first_tokens rotates whole heads, which need an even width, got {width}; change head_dim"
            )

    def _uneven(self, dims: AttentionDims) -> str:
        fix = "change head_dim or the head count"
        if self.mode is AttentionMode.DECOUPLED:
            heads = 1 if self.is_latent else dims.n_kv_heads
            nearest = [str(heads * width) for width in (dims.rope - 1, dims.rope + 1) if width]
            fix = f"set geo_dim to {' or '.join(nearest)}"
        return f"rotary positions need an even width per head, got {dims.rope}; {fix}"

    def dims(self) -> AttentionDims:
        """Derive the widths. Latent: every query head reads the one latent and the one geometric key."""
        heads, kv_heads = self.n_heads, self.n_kv_heads or self.n_heads
        head_dim = self.head_dim or self.d_model // heads
        if self.mode is AttentionMode.BOTTLENECK:
            assert self.attn_dim is not None
            head_dim = self.attn_dim // heads
        if self.mode is not AttentionMode.DECOUPLED:
            both = (("k", kv_heads, head_dim), ("v", kv_heads, head_dim))
            return AttentionDims(heads, kv_heads, head_dim, head_dim, head_dim, both)
        assert self.sem_dim is not None
        assert self.geo_dim is not None
        if self.layout == "latent":
            streams = (("c", 1, self.sem_dim), ("k_geo", 1, self.geo_dim))
            n = self.exact_first_tokens
            first = (("k_first", kv_heads, head_dim), ("v_first", kv_heads, head_dim)) if n else ()
            return AttentionDims(
                heads, kv_heads, self.sem_dim + self.geo_dim, self.sem_dim, self.geo_dim, streams, n, first
            )
        sem, geo = self.sem_dim // kv_heads, self.geo_dim // kv_heads
        v = self.v_dim // kv_heads if self.v_dim else head_dim
        streams = (("k_sem", kv_heads, sem), ("k_geo", kv_heads, geo), ("v", kv_heads, v))
        return AttentionDims(heads, kv_heads, sem + geo, v, geo, streams)

    @property
    def query_dim(self) -> int:
        """Width per head of the projected query: `qk`, or under `latent` the width before the maps."""
        return (self.head_dim or self.d_model // self.n_heads) if self.is_latent else self.dims().qk

    @property
    def value_dim(self) -> int:
        """Width per head of what `out` reads: `v`, or under `latent` the width after the up-projection."""
        return self.query_dim if self.is_latent else self.dims().v

    @property
    def is_latent(self) -> bool:
        """Whether one latent is the semantic key and the value of all heads."""
        return self.mode is AttentionMode.DECOUPLED and self.layout == "latent"

    def parameter_shapes(self) -> Shapes:
        return attention_shapes(self)

    def infer(self, width: Width) -> Cost:
        return attention_cost(self, width)


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
    shapes |= {f"{name}.bias": (out,) for name, out in (rows | {"out": m}).items() if name in biased or name in always}
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


def attention_cost(config: AttentionLayerConfig, width: Width) -> Cost:
    """Check the width and count.

    The latent layout decodes in its absorbed form, and a forward over a sequence takes the expanded one where
    that is less work; the maps cost the same in both, once per token. The expanded form maps the null latent too,
    once per forward.
    """
    expect_width(width, config.d_model, "d_model")
    dims = config.dims()
    is_expanded = _trains_expanded(config)
    work = AttentionWork(
        dims.n_heads * (dims.qk + dims.v),
        config.local_window,
        int(config.null_attn),
        dims.n_heads * (2 * config.query_dim + dims.rope) if is_expanded else None,
        forward_weights=2 * dims.n_heads * dims.v * config.query_dim * (is_expanded and config.null_attn),
    )
    cost = layer_cost(
        _label(config),
        config.type,
        width,
        width,
        config.parameter_shapes(),
        _saved(config),
        work,
        dims.streams,
        COPIED if config.is_latent else (),
        _spared(config) if uses_split_keys(config) else 0,
    )
    return _with_first_tokens(config, cost, work) if dims.first_tokens else cost


def _with_first_tokens(config: AttentionLayerConfig, cost: Cost, work: AttentionWork) -> Cost:
    """Add what first tokens take: features that carry their part of the softmax, projections, scores and values of
    their own, and the query's product with the mean of keys."""
    dims, heads, width = config.dims(), config.n_heads, config.query_dim
    once = sum(math.prod(shape) for shape in first_tokens_shapes(config).values() if len(shape) > 1)
    expanded = heads * (align_width(width + dims.rope + 2) + align_width(width + 1))
    work = replace(
        work,
        width=2 * heads * align_width(dims.qk + 2),
        forward_width=expanded if _trains_expanded(config) else None,
        first=dims.first_tokens,
        first_width=2 * heads * width,
        first_weights=once,
    )
    return replace(
        cost,
        matmul_params_used=cost.matmul_params_used - once + heads * width,
        attention=(work,),
        kv_first=((dims.first_tokens, dims.first_streams),),
    )


def _saved(config: AttentionLayerConfig) -> int:
    """Elements kept for backward: input, q, k, v, output and log-sum-exp, inputs of elementwise steps.

    As the fp32 score op keeps them: keys and values repeated to all query heads, q, k, v and output of one
    width, the output once more in the order that `out` reads.
    """
    dims, heads = config.dims(), config.n_heads
    queries, keys = heads * dims.qk, dims.n_kv_heads * dims.qk
    if config.is_latent:
        return _saved_latent(config)
    norms = 2 * (queries + keys) + heads + dims.n_kv_heads if config.qk_norm else 0
    scaled = queries * (config.decoupled_gate + config.learned_temperature)
    return config.d_model + 4 * heads * max(dims.qk, dims.v) + heads * dims.v + heads + norms + scaled


def _saved_latent(config: AttentionLayerConfig) -> int:
    """As `_saved`: expanded, the latent with k_geo and q, k, v and output as wide as the keys of every head;
    absorbed, the one key that is the value too, queries and output as wide, and what the maps read (of the queries
    a view, which keeps all of their parts). A norm keeps the latent before it. First tokens add their queries, the
    semantic ones once more, their scores and probabilities, what they give, and features of the others.
    """
    dims, heads, width = config.dims(), config.n_heads, config.n_heads * config.query_dim
    projected = config.d_model + width + heads * dims.rope * config.decoupled_gate
    scaled = (width + heads * dims.rope) * config.learned_temperature
    keys, first = config.query_dim + dims.rope if _trains_expanded(config) else dims.qk, 0
    if dims.first_tokens:
        keys = align_width(keys + 2)
        first = (3 if _trains_expanded(config) else 4) * width + 2 * heads * (dims.first_tokens + 1)
        first += width * config.learned_temperature
    if _trains_expanded(config):
        form = dims.v + dims.rope + 4 * heads * keys
    else:
        form = width + heads * dims.rope + keys + 2 * heads * keys + heads * dims.v
    norm = dims.v + 1 if config.mla else 0
    return projected + scaled + form + heads + width + first + norm


def uses_split_keys(config: AttentionLayerConfig) -> bool:
    """Whether training uses the kernel with split keys, in 16 bits on a device that has it.

    It takes keys wider than fused backends do, of its tiles' widths; with a window some forwards may not use it.
    """
    if not config.is_latent or config.null_attn or config.exact_first_tokens or config.dropout > 0:
        return False
    dims = config.dims()
    sem = config.query_dim if _trains_expanded(config) else dims.v
    widths = {"sem": sem, "geo": dims.rope, "value": sem}
    return (
        sem + dims.rope > FUSED_WIDEST
        and config.local_window is None
        and all(
            PART_NARROWEST <= width <= PART_WIDEST[part] and width & (width - 1) == 0 for part, width in widths.items()
        )
    )


def _spared(config: AttentionLayerConfig) -> int:
    """Elements of `_saved_latent` that are not kept where keys stay in two parts: expanded, queries alone are as wide
    as keys, and values and output as the latent's part; absorbed, the output is as wide as the value. One geometric key
    after RoPE is kept besides, which joined keys copy.
    """
    dims, heads = config.dims(), config.n_heads
    turned = dims.rope * config.rope_enabled
    if _trains_expanded(config):
        return heads * (config.query_dim + 3 * dims.rope) - turned
    return heads * dims.qk - turned


def _trains_expanded(config: AttentionLayerConfig) -> bool:
    """Whether a forward over a whole sequence gives every head its own keys and values: a latent wider than a
    head makes those the smaller ones."""
    return config.is_latent and config.dims().v > config.query_dim


def _label(config: AttentionLayerConfig) -> str:
    dims = config.dims()
    is_plain = config.is_latent or dims.n_kv_heads == dims.n_heads
    heads = f"{dims.n_heads}" if is_plain else f"{dims.n_heads}:{dims.n_kv_heads}"
    if config.mode is not AttentionMode.DECOUPLED:
        return f"{config.mode}, {heads} heads x {dims.qk}"
    names = {"k_sem": "sem", "k_geo": "geo", "c": "latent"}
    widths = " ".join(f"{names.get(name, name)} {count * width}" for name, count, width in dims.streams)
    first = f", first {dims.first_tokens} exact" if dims.first_tokens else ""
    return f"{config.mode} {config.layout}, {heads} heads, {widths}{first}"
