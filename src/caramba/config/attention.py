"""Schema of attention: its modes, the rules between its fields, the widths, weights and cost that follow."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from caramba.config.base import Config
from caramba.config.cost import AttentionWork, Cost, Width, expect_width, layer_cost
from caramba.config.kvcache import Streams
from caramba.config.leaf import LayerConfig, Positive, Probability, Shapes


class AttentionMode(StrEnum):
    """How queries, keys and values are projected and what is cached."""

    STANDARD = "standard"
    GQA = "gqa"
    DECOUPLED = "decoupled"
    BOTTLENECK = "bottleneck"


def _mode(value: Any) -> Any:
    return (
        AttentionMode(value.lower())
        if isinstance(value, str) and value.lower() in set(AttentionMode)
        else value
    )


class RopeScalingConfig(Config):
    """Rescaling of the rotary frequencies for contexts longer than those a model was trained on.

    `llama3` is the banded interpolation of Llama 3.1 (Grattafiori et al., 2024, arXiv:2407.21783); `linear`
    divides every frequency by `factor` (Chen et al., 2023, arXiv:2306.15595); `dynamic` widens the base with the
    length of each forward beyond `original_max_position_embeddings`; `yarn` interpolates by band and scales the
    rotated features by `attention_factor`, 0.1 ln(factor) + 1 unless given (Peng et al., 2023, arXiv:2309.00071).
    """

    type: Literal["llama3", "linear", "dynamic", "yarn"]
    factor: Annotated[float, Field(ge=1.0)] = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: Positive = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: Annotated[float, Field(gt=0)] | None = None

    _belongs: ClassVar[dict[str, tuple[str, ...]]] = {
        "low_freq_factor": ("llama3",),
        "high_freq_factor": ("llama3",),
        "original_max_position_embeddings": ("llama3", "dynamic", "yarn"),
        "beta_fast": ("yarn",),
        "beta_slow": ("yarn",),
        "attention_factor": ("yarn",),
    }

    @model_validator(mode="after")
    def _rules(self) -> RopeScalingConfig:
        for name, types in self._belongs.items():
            # A frozen manifest states every field, so what counts is another value than the default.
            if self.type not in types and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} belongs to type={' and '.join(types)}, got type={self.type}; remove it"
                )
        if self.type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor:g} must be below high_freq_factor={self.high_freq_factor:g}"
            )
        if self.type == "yarn" and self.beta_slow >= self.beta_fast:
            raise ValueError(f"beta_slow={self.beta_slow:g} must be below beta_fast={self.beta_fast:g}")
        return self


@dataclass(frozen=True)
class AttentionDims:
    """Widths of one attention layer, derived once from its config.

    Per head: `qk` (query and key), `v`; cached streams as (name, heads, width per head), all in elements.
    `first_streams` are stored besides, of the first `first_tokens` tokens of a sequence alone.
    """

    n_heads: int
    n_kv_heads: int
    qk: int
    v: int
    rope: int
    streams: Streams
    first_tokens: int = 0
    first_streams: Streams = ()

    @property
    def cached(self) -> int:
        """Elements that the cache stores per token, all streams and heads together."""
        return sum(heads * width for _, heads, width in self.streams)


def aligned(width: int) -> int:
    """Return the next multiple of 8, the widths that fused backends take."""
    return -(-width // 8) * 8


COPIED = ("q.weight", "q.bias", "out.weight")
"""The weights of a latent layer that surgery takes from the teacher as they are; all others are made of statistics."""


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

    type: Literal["AttentionLayer"] = "AttentionLayer"
    d_model: Positive
    n_heads: Positive
    n_kv_heads: Positive | None = None
    head_dim: Positive | None = None
    mode: Annotated[AttentionMode, BeforeValidator(_mode)] = AttentionMode.STANDARD
    layout: Literal["per_head", "latent"] = "per_head"
    sem_dim: Positive | None = None
    geo_dim: Positive | None = None
    v_dim: Positive | None = None
    attn_dim: Positive | None = None
    rope_enabled: bool = True
    rope_base: Annotated[float, Field(gt=0)] = 10000.0
    rope_scaling: RopeScalingConfig | None = None
    rope_semantic: bool = False
    decoupled_gate: bool = False
    decoupled_gate_dynamic: bool = False
    tie_qk: bool = False
    exact_first_tokens: Annotated[int, Field(ge=0)] = 0
    null_attn: bool = False
    learned_temperature: bool = False
    local_window: Positive | None = None
    q_chunk: Positive | None = None
    bias: bool | Literal["qkv"] = Field(
        default=False, description="true: all projections; qkv: queries, keys and values, not the output"
    )
    qk_norm: bool = False
    qk_norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    dropout: Probability = 0.0

    _decoupled_only: ClassVar[tuple[str, ...]] = (
        "sem_dim",
        "geo_dim",
        "v_dim",
        "decoupled_gate",
        "decoupled_gate_dynamic",
        "tie_qk",
        "rope_semantic",
        "exact_first_tokens",
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
                f"n_kv_heads={kv_heads} does not divide n_heads={self.n_heads}; use a divisor of "
                f"{self.n_heads}"
            )
        if self.mode is AttentionMode.STANDARD and kv_heads != self.n_heads:
            raise ValueError(
                f"mode=standard has as many key/value heads as heads ({self.n_heads}), got "
                f"n_kv_heads={kv_heads}; use mode=gqa"
            )
        if self.mode is AttentionMode.BOTTLENECK:
            if self.attn_dim is None:
                raise ValueError(
                    "mode=bottleneck needs attn_dim, the narrow width of queries, keys and values"
                )
            if self.attn_dim % self.n_heads:
                raise ValueError(
                    f"n_heads={self.n_heads} does not divide attn_dim={self.attn_dim}; use a multiple of "
                    f"{self.n_heads}"
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
            raise ValueError(
                f"rotary positions need an even width per head, got {dims.rope}; change head_dim, geo_dim "
                "or the head count"
            )
        if self.rope_scaling is not None and not self.rope_enabled:
            raise ValueError(
                "rope_scaling is set while rope_enabled is false; enable RoPE or remove the scaling"
            )
        return self

    def _decoupled_rules(self, kv_heads: int) -> None:
        if self.sem_dim is None or self.geo_dim is None:
            raise ValueError("mode=decoupled needs sem_dim and geo_dim, the cached widths of the two paths")
        if self.rope_semantic and not self.rope_enabled:
            raise ValueError(
                "rope_semantic is set while rope_enabled is false; enable RoPE or remove rope_semantic"
            )
        if self.decoupled_gate_dynamic and not self.decoupled_gate:
            raise ValueError("decoupled_gate_dynamic needs decoupled_gate: true")
        if self.layout == "latent":
            refused = [
                name for name in ("rope_semantic", "tie_qk", "v_dim", "qk_norm") if getattr(self, name)
            ]
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
                    f"{name}={width} is not a multiple of the {kv_heads} key/value heads; use a multiple of "
                    f"{kv_heads}"
                )
        if self.rope_semantic and self.sem_dim // kv_heads % 2:
            raise ValueError(
                f"rope_semantic rotates the semantic path, which needs an even width per head, got "
                f"{self.sem_dim // kv_heads}; change sem_dim or the head count"
            )
        if self.v_dim is None and self.head_dim is None and self.d_model % self.n_heads:
            raise ValueError(
                f"n_heads={self.n_heads} does not divide d_model={self.d_model}; set v_dim or head_dim"
            )

    def _first_tokens_rules(self) -> None:
        reasons = {
            "local_window": "a query would see tokens that its window hides",
            "null_attn": "one row stands before the tokens already, that of the first ones",
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
        """Return the projections, then what `bias`, `qk_norm`, gate, temperature and null attention add.

        The latent's down projection and the output always carry a bias: they hold the means that surgery
        splits off.
        """
        dims, m = self.dims(), self.d_model
        heads, kv_heads = dims.n_heads, dims.n_kv_heads
        rows: dict[str, int]
        norms: Shapes = {}
        if self.is_latent:
            rows = {"q": heads * self.query_dim, "c": dims.v, "k_geo": dims.rope}
        elif self.mode is AttentionMode.DECOUPLED:
            sem, geo = dims.qk - dims.rope, dims.rope
            rows = {
                "q_sem": heads * sem,
                "q_geo": heads * geo,
                "k_sem": kv_heads * sem,
                "k_geo": kv_heads * geo,
                "v": kv_heads * dims.v,
            }
            norms = {"q_sem_norm": (sem,), "k_sem_norm": (sem,), "q_geo_norm": (geo,), "k_geo_norm": (geo,)}
            if self.tie_qk:
                del rows["k_sem"]
        else:
            rows = {"q": heads * dims.qk, "k": kv_heads * dims.qk, "v": kv_heads * dims.v}
            norms = {"q_norm": (dims.qk,), "k_norm": (dims.qk,)}
        shapes: Shapes = {f"{name}.weight": (out, m) for name, out in rows.items()}
        shapes["out.weight"] = (m, heads * self.value_dim)
        if self.is_latent:
            shapes["q_sem_map"] = (heads, self.query_dim, dims.v)
            shapes["q_geo_map"] = (heads, self.query_dim, dims.rope)
            shapes["v_up"] = (heads, dims.v, self.query_dim)
        always = ("c", "out") if self.is_latent else ()
        biased = rows if self.bias == "qkv" else rows | {"out": m} if self.bias else {}
        shapes |= {
            f"{name}.bias": (out,)
            for name, out in (rows | {"out": m}).items()
            if name in biased or name in always
        }
        if self.qk_norm:
            shapes |= {f"{name}.weight": shape for name, shape in norms.items()}
        if self.decoupled_gate:
            shapes["gate"] = (heads,)
        if self.decoupled_gate_dynamic:
            shapes["gate_dynamic.weight"] = (heads, m)
        if self.learned_temperature:
            shapes["temperature"] = (heads,)
        if self.null_attn and self.is_latent:
            shapes |= {"null_c": (dims.v,), "null_geo": (dims.rope,)}
        elif self.null_attn:
            # One-dimensional: added once per sequence like a bias, and decayed no more than one.
            shapes |= {"null_k": (kv_heads * dims.qk,), "null_v": (kv_heads * dims.v,)}
        return shapes | self._first_tokens_shapes()

    def _first_tokens_shapes(self) -> Shapes:
        """Return the weights that only the first tokens go through; the value's bias holds minus the mean that
        surgery splits off."""
        if not self.exact_first_tokens:
            return {}
        width = (self.n_kv_heads or self.n_heads) * self.query_dim
        shapes: Shapes = {
            "first.k.weight": (width, self.d_model),
            "first.v.weight": (width, self.d_model),
            "first.v.bias": (width,),
            "first.key_mean": (width,),
        }
        return shapes | ({"first.k.bias": (width,)} if self.bias else {})

    def infer(self, width: Width) -> Cost:
        """Check the width and count.

        The latent layout decodes in its absorbed form, and a forward over a sequence takes the expanded one where
        that is less work; the maps cost the same in both, once per token.
        """
        expect_width(width, self.d_model, "d_model")
        dims = self.dims()
        expanded = dims.n_heads * (2 * self.query_dim + dims.rope) if self._trains_expanded else None
        work = AttentionWork(
            dims.n_heads * (dims.qk + dims.v), self.local_window, int(self.null_attn), expanded
        )
        cost = layer_cost(
            self._label(),
            self.type,
            width,
            width,
            self.parameter_shapes(),
            self._saved(),
            work,
            dims.streams,
            COPIED if self.is_latent else (),
        )
        return self._with_first_tokens(cost, work) if dims.first_tokens else cost

    def _with_first_tokens(self, cost: Cost, work: AttentionWork) -> Cost:
        """Add what first tokens take: features that carry their part of the softmax, projections, scores and values of
        their own, and the query's product with the mean of keys."""
        dims, heads, width = self.dims(), self.n_heads, self.query_dim
        once = sum(math.prod(shape) for shape in self._first_tokens_shapes().values() if len(shape) > 1)
        expanded = heads * (aligned(width + dims.rope + 2) + aligned(width + 1))
        work = replace(
            work,
            width=2 * heads * aligned(dims.qk + 2),
            forward_width=expanded if self._trains_expanded else None,
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

    def _saved(self) -> int:
        """Elements kept for backward: input, q, k, v, output and log-sum-exp, inputs of elementwise steps.

        As the fp32 score op keeps them: keys and values repeated to all query heads, q, k, v and output of one
        width, the output once more in the order that `out` reads.
        """
        dims, heads = self.dims(), self.n_heads
        queries, keys = heads * dims.qk, dims.n_kv_heads * dims.qk
        if self.is_latent:
            return self._saved_latent()
        norms = 2 * (queries + keys) + heads + dims.n_kv_heads if self.qk_norm else 0
        scaled = queries * (self.decoupled_gate + self.learned_temperature)
        return self.d_model + 4 * heads * max(dims.qk, dims.v) + heads * dims.v + heads + norms + scaled

    def _saved_latent(self) -> int:
        """As `_saved`: expanded, the latent with k_geo and q, k, v and output as wide as the keys of every head;
        absorbed, the one key that is the value too, queries and output as wide, and what the maps read (of the queries
        a view, which keeps all of their parts). First tokens add their queries, the semantic ones once more, their
        scores and probabilities, what they give, and features of the others.
        """
        dims, heads, width = self.dims(), self.n_heads, self.n_heads * self.query_dim
        projected = self.d_model + width + heads * dims.rope * self.decoupled_gate
        scaled = (width + heads * dims.rope) * self.learned_temperature
        keys, first = self.query_dim + dims.rope if self._trains_expanded else dims.qk, 0
        if dims.first_tokens:
            keys = aligned(keys + 2)
            first = (3 if self._trains_expanded else 4) * width + 2 * heads * (dims.first_tokens + 1)
            first += width * self.learned_temperature
        if self._trains_expanded:
            form = dims.v + dims.rope + 4 * heads * keys
        else:
            form = width + heads * dims.rope + keys + 2 * heads * keys + heads * dims.v
        return projected + scaled + form + heads + width + first

    @property
    def _trains_expanded(self) -> bool:
        """Whether a forward over a whole sequence gives every head its own keys and values: a latent wider than a
        head makes those the smaller ones."""
        return self.is_latent and self.dims().v > self.query_dim

    def _label(self) -> str:
        dims = self.dims()
        is_plain = self.is_latent or dims.n_kv_heads == dims.n_heads
        heads = f"{dims.n_heads}" if is_plain else f"{dims.n_heads}:{dims.n_kv_heads}"
        if self.mode is not AttentionMode.DECOUPLED:
            return f"{self.mode}, {heads} heads x {dims.qk}"
        names = {"k_sem": "sem", "k_geo": "geo", "c": "latent"}
        widths = " ".join(f"{names.get(name, name)} {count * width}" for name, count, width in dims.streams)
        first = f", first {dims.first_tokens} exact" if dims.first_tokens else ""
        return f"{self.mode} {self.layout}, {heads} heads, {widths}{first}"
