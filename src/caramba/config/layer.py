"""Schemas of the layers: every field a user may set, the rules between fields, and the dimensions that follow."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from caramba.config.base import Config, Later
from caramba.config.node import NodeConfig

Positive = Annotated[int, Field(gt=0)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]


class AttentionMode(StrEnum):
    """How queries, keys and values are projected and what is cached."""

    STANDARD = "standard"
    GQA = "gqa"
    DECOUPLED = "decoupled"
    BOTTLENECK = "bottleneck"


def _mode(value: Any) -> Any:
    return AttentionMode(value.lower()) if isinstance(value, str) and value.lower() in set(AttentionMode) else value


class RopeScalingConfig(Config):
    """Rescaling of the rotary frequencies for contexts longer than those a model was trained on.

    `llama3` is the banded interpolation of Llama 3.1 (Grattafiori et al., 2024, arXiv:2407.21783); `linear` divides
    every frequency by `factor` (Chen et al., 2023, arXiv:2306.15595).
    """

    type: Annotated[Literal["llama3", "linear", "dynamic", "yarn"], Later("the model substrate work", "dynamic", "yarn")]
    factor: Annotated[float, Field(ge=1.0)] = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: Positive = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclass(frozen=True)
class AttentionDims:
    """Widths of one attention layer, derived once from its config.

    Per head: `qk` (query and key), `v`; cached streams as (name, heads, width per head), all in elements.
    """

    n_heads: int
    n_kv_heads: int
    qk: int
    v: int
    rope: int
    streams: tuple[tuple[str, int, int], ...]

    @property
    def cached(self) -> int:
        """Elements that the cache stores per token, all streams and heads together."""
        return sum(heads * width for _, heads, width in self.streams)


class AttentionLayerConfig(NodeConfig):
    """Self-attention in four modes. `sem_dim`, `geo_dim`, `v_dim` are cached widths, all key/value heads together."""

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
    rope_semantic: Annotated[bool, Later("the model substrate work")] = False
    decoupled_gate: bool = False
    decoupled_gate_dynamic: bool = False
    tie_qk: bool = False
    null_attn: Annotated[bool, Later("the model substrate work")] = False
    learned_temperature: bool = False
    local_window: Positive | None = None
    q_chunk: Annotated[Positive | None, Later("the model substrate work")] = None
    bias: bool = False
    qk_norm: bool = False
    dropout: Probability = 0.0

    _decoupled_only: ClassVar[tuple[str, ...]] = ("sem_dim", "geo_dim", "v_dim", "decoupled_gate", "decoupled_gate_dynamic", "tie_qk")

    @model_validator(mode="after")
    def _rules(self) -> AttentionLayerConfig:
        kv_heads = self.n_kv_heads or self.n_heads
        if self.head_dim is None and self.mode in (AttentionMode.STANDARD, AttentionMode.GQA) and self.d_model % self.n_heads:
            raise ValueError(f"n_heads={self.n_heads} does not divide d_model={self.d_model}; use a divisor of {self.d_model}, or set head_dim")
        if self.n_heads % kv_heads:
            raise ValueError(f"n_kv_heads={kv_heads} does not divide n_heads={self.n_heads}; use a divisor of {self.n_heads}")
        if self.mode is AttentionMode.STANDARD and kv_heads != self.n_heads:
            raise ValueError(f"mode=standard has as many key/value heads as heads ({self.n_heads}), got n_kv_heads={kv_heads}; use mode=gqa")
        if self.mode is AttentionMode.BOTTLENECK:
            if self.attn_dim is None:
                raise ValueError("mode=bottleneck needs attn_dim, the narrow width of queries, keys and values")
            if self.attn_dim % self.n_heads:
                raise ValueError(f"n_heads={self.n_heads} does not divide attn_dim={self.attn_dim}; use a multiple of {self.n_heads}")
        elif self.attn_dim is not None:
            raise ValueError(f"attn_dim belongs to mode=bottleneck, got mode={self.mode}; remove it")
        if self.mode is AttentionMode.DECOUPLED:
            self._decoupled_rules(kv_heads)
        else:
            foreign = [name for name in self._decoupled_only if getattr(self, name)]
            if foreign or self.layout != "per_head":
                raise ValueError(f"{(foreign or ['layout'])[0]} belongs to mode=decoupled, got mode={self.mode}; remove it or set mode: decoupled")
        dims = self.dims()
        if self.rope_enabled and dims.rope % 2:
            raise ValueError(f"rotary positions need an even width per head, got {dims.rope}; change head_dim, geo_dim or the head count")
        if self.rope_scaling is not None and not self.rope_enabled:
            raise ValueError("rope_scaling is set while rope_enabled is false; enable RoPE or remove the scaling")
        return self

    def _decoupled_rules(self, kv_heads: int) -> None:
        if self.sem_dim is None or self.geo_dim is None:
            raise ValueError("mode=decoupled needs sem_dim and geo_dim, the cached widths of the two paths")
        if self.layout == "latent":
            refused = [name for name in ("rope_semantic", "tie_qk", "v_dim") if getattr(self, name)]
            if refused:
                raise ValueError(f"{refused[0]} is not defined for layout=latent, where one latent is key and value; remove it or use layout: per_head")
            return
        for name in ("sem_dim", "geo_dim", "v_dim"):
            width = getattr(self, name)
            if width is not None and width % kv_heads:
                raise ValueError(f"{name}={width} is not a multiple of the {kv_heads} key/value heads; use a multiple of {kv_heads}")
        if self.v_dim is None and self.head_dim is None and self.d_model % self.n_heads:
            raise ValueError(f"n_heads={self.n_heads} does not divide d_model={self.d_model}; set v_dim or head_dim")
        if self.decoupled_gate_dynamic and not self.decoupled_gate:
            raise ValueError("decoupled_gate_dynamic needs decoupled_gate: true")

    def dims(self) -> AttentionDims:
        """Derive the widths. Latent: queries keep `head_dim` per head and read one latent of `sem_dim` and `geo_dim` keys."""
        heads, kv_heads = self.n_heads, self.n_kv_heads or self.n_heads
        head_dim = self.head_dim or self.d_model // heads
        if self.mode is AttentionMode.BOTTLENECK:
            assert self.attn_dim is not None
            head_dim = self.attn_dim // heads
        if self.mode is not AttentionMode.DECOUPLED:
            return AttentionDims(heads, kv_heads, head_dim, head_dim, head_dim, (("k", kv_heads, head_dim), ("v", kv_heads, head_dim)))
        assert self.sem_dim is not None and self.geo_dim is not None
        if self.layout == "latent":
            streams = (("c", 1, self.sem_dim), ("k_geo", 1, self.geo_dim))
            return AttentionDims(heads, kv_heads, self.sem_dim + self.geo_dim, self.sem_dim, self.geo_dim, streams)
        sem, geo = self.sem_dim // kv_heads, self.geo_dim // kv_heads
        v = self.v_dim // kv_heads if self.v_dim else head_dim
        streams = (("k_sem", kv_heads, sem), ("k_geo", kv_heads, geo), ("v", kv_heads, v))
        return AttentionDims(heads, kv_heads, sem + geo, v, geo, streams)


class RMSNormLayerConfig(NodeConfig):
    """Root-mean-square normalisation over the features (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

    target = "caramba.layer.rms_norm:RMSNormLayer"

    type: Literal["RMSNormLayer"] = "RMSNormLayer"
    d_model: Positive
    eps: Annotated[float, Field(gt=0)] = 1e-5
    elementwise_affine: bool = True


class LayerNormLayerConfig(NodeConfig):
    """Layer normalisation over the features (Ba et al., 2016, arXiv:1607.06450)."""

    target = "caramba.layer.layer_norm:LayerNormLayer"

    type: Literal["LayerNormLayer"] = "LayerNormLayer"
    d_model: Positive
    eps: Annotated[float, Field(gt=0)] = 1e-5
    bias: bool = True


class SwiGLULayerConfig(NodeConfig):
    """Gated feed-forward network: down(silu(gate(x)) * up(x)) (Shazeer, 2020, arXiv:2002.05202)."""

    target = "caramba.layer.swiglu:SwiGLULayer"

    type: Literal["SwiGLULayer"] = "SwiGLULayer"
    d_model: Positive
    d_ff: Positive
    bias: bool = False


class LinearLayerConfig(NodeConfig):
    """Linear map from `d_in` to `d_out` features. `reduce` says how a ParallelTopology's stack is consumed first."""

    target = "caramba.layer.linear:LinearLayer"

    type: Literal["LinearLayer"] = "LinearLayer"
    d_in: Positive
    d_out: Positive
    bias: bool = False
    reduce: Literal["mean", "sum", "concat"] | None = None


class DropoutLayerConfig(NodeConfig):
    """Dropout; the identity in eval mode."""

    target = "caramba.layer.dropout:DropoutLayer"

    type: Literal["DropoutLayer"] = "DropoutLayer"
    p: Probability
