"""Scaling of a network's schema to another width and depth: every width that follows from d_model follows it."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from caramba.config.attention import AttentionLayerConfig
from caramba.config.attention_dims import AttentionMode
from caramba.config.extension import NodeConfig
from caramba.config.layer import SwiGLULayerConfig
from caramba.config.model import ModelSpec, SurgeryConfig
from caramba.config.topology import NestedTopologyConfig, TopologyConfig
from caramba.errors import ConfigError

LATENT_STEP = 16
WIDTHS = ("d_model", "d_in", "d_out")


@dataclass(frozen=True)
class Scale:
    """A target size of a model: width `to_d_model` from `d_model`, repeats and `d_ff`.

    `repeat` is that of the first outermost NestedTopology, `d_ff` that of its first feed-forward; others follow in
    proportion. None keeps the proportion.
    """

    d_model: int
    to_d_model: int
    repeat: int | None = None
    d_ff: int | None = None

    @property
    def width(self) -> Fraction:
        """The ratio of the widths."""
        return Fraction(self.to_d_model, self.d_model)

    @property
    def label(self) -> str:
        """The scale as an error message names it."""
        depth = "" if self.repeat is None else f", repeat {self.repeat}"
        return f"d_model {self.to_d_model}{depth}" + ("" if self.d_ff is None else f", d_ff {self.d_ff}")


def widths_of(node: Any) -> list[int]:
    """Return the widths of a layer's input and output, which are scaled exactly."""
    return [getattr(node, name) for name in WIDTHS if name in type(node).model_fields]


def scalable(layer: AttentionLayerConfig) -> list[tuple[str, str]]:
    """Return the fields of an attention layer that follow the width, each with the reason for its value."""
    heads = layer.n_kv_heads or layer.n_heads
    width = layer.query_dim
    fields = [("n_heads", f"query and key width {width} per head kept")]
    if layer.n_kv_heads is not None:
        fields.append(("n_kv_heads", f"{layer.n_heads // heads} query heads each, as before"))
    if layer.mode is AttentionMode.BOTTLENECK:
        return [*fields, ("attn_dim", f"{width} per head")]
    is_latent = layer.layout == "latent"
    for name in ("sem_dim", "geo_dim", "v_dim"):
        value = getattr(layer, name)
        if value is not None:
            fields.append((name, "with d_model" if is_latent else f"{value // heads} per key/value head"))
    return fields


def scale_spec(spec: ModelSpec, scale: Scale, block_size: int | None = None) -> ModelSpec:
    """Return a network of the scaled width and depth; learned positions get `block_size` rows when it is given.

    Raises:
        ConfigError: a width that does not follow d_model in whole numbers.
    """
    embedder: dict[str, Any] = {"d_model": scale.to_d_model}
    if block_size is not None and spec.embedder.max_positions is not None:
        embedder["max_positions"] = block_size
    topology = _scaled(spec.topology, scale, _Anchors(spec.topology), is_outermost=True)
    return ModelSpec.model_validate(
        {
            "type": spec.type,
            "name": spec.name,
            "embedder": spec.embedder.model_copy(update=embedder),
            "topology": topology,
            "head": spec.head,
        }
    )


def scale_surgery(surgery: SurgeryConfig, scale: Scale) -> SurgeryConfig:
    """Return the surgery with its widths scaled as those of the attention that it describes."""
    changes = {
        name: latent_width(value, scale) if surgery.layout == "latent" else _whole(value * scale.width, name)
        for name in ("sem_dim", "geo_dim", "v_dim")
        if (value := getattr(surgery, name)) is not None
    }
    return surgery.model_copy(update=changes)


def latent_width(value: int, scale: Scale) -> int:
    """Return a latent layer's width, which all heads share, at another model width: a multiple of 16 there."""
    if scale.width == 1:
        return value
    return max(LATENT_STEP, round(value * scale.width / LATENT_STEP) * LATENT_STEP)


class _Anchors:
    """The repeat and the feed-forward width that a scale names: the first of their kind."""

    def __init__(self, node: NodeConfig) -> None:
        self.repeat: int | None = None
        self.d_ff: int | None = None
        self._look(node)

    def _look(self, node: Any) -> None:
        if isinstance(node, NestedTopologyConfig):
            self.repeat = self.repeat or node.repeat
        if isinstance(node, SwiGLULayerConfig):
            self.d_ff = self.d_ff or node.d_ff
        if isinstance(node, TopologyConfig):
            for child in node.layers:
                self._look(child)


def _scaled(node: Any, scale: Scale, anchors: _Anchors, *, is_outermost: bool) -> Any:
    changes: dict[str, Any] = {}
    if isinstance(node, TopologyConfig):
        if isinstance(node, NestedTopologyConfig) and is_outermost:
            # Only the outermost repeats grow: nested ones would multiply.
            is_outermost = False
            if scale.repeat is not None and anchors.repeat is not None:
                changes["repeat"] = max(1, round(Fraction(node.repeat * scale.repeat, anchors.repeat)))
        changes["layers"] = tuple(
            _scaled(child, scale, anchors, is_outermost=is_outermost) for child in node.layers
        )
    elif isinstance(node, AttentionLayerConfig):
        changes = _attention(node, scale)
    elif isinstance(node, SwiGLULayerConfig):
        changes["d_model"] = _whole(node.d_model * scale.width, "SwiGLULayer.d_model")
        followed = Fraction(node.d_ff) * scale.width
        if scale.d_ff is not None and anchors.d_ff is not None:
            followed = Fraction(node.d_ff * scale.d_ff, anchors.d_ff)
        changes["d_ff"] = max(1, round(followed))
    else:
        for name in WIDTHS:
            if name in type(node).model_fields:
                changes[name] = _whole(getattr(node, name) * scale.width, f"{node.type}.{name}")
    values = {name: getattr(node, name) for name in type(node).model_fields} | changes
    return type(node).model_validate(values) if changes else node


def _attention(layer: AttentionLayerConfig, scale: Scale) -> dict[str, Any]:
    ratio = scale.width
    changes: dict[str, Any] = {"d_model": _whole(layer.d_model * ratio, "AttentionLayer.d_model")}
    for name, _ in scalable(layer):
        value = getattr(layer, name)
        if layer.layout == "latent" and name.endswith("_dim"):
            changes[name] = latent_width(value, scale)
        else:
            changes[name] = _whole(value * ratio, f"AttentionLayer.{name}")
    return changes


def _whole(value: Fraction, name: str) -> int:
    if value.denominator != 1:
        raise ConfigError(
            f"fit: {name} would be {float(value):g}, not a whole number; give the layer a width and head counts that "
            "divide d_model's"
        )
    return value.numerator
