"""Auto-fit: a preset scaled to a number of parameters, in the preset's own proportions, without torch.

Every head keeps its widths, so the model's width, its heads, key/value heads and decoupled dims grow together;
depth grows with the width; the feed-forward width closes what whole heads and blocks leave open.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pydantic import ValidationError

from caramba.config.attention import AttentionLayerConfig
from caramba.config.attention_dims import AttentionMode
from caramba.config.estimate.model import model_cost
from caramba.config.estimate.units import format_count, short_count
from caramba.config.extension import NodeConfig
from caramba.config.layer import SwiGLULayerConfig
from caramba.config.model import ModelConfig, ModelSpec, SurgeryConfig
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
        changes["layers"] = tuple(_scaled(child, scale, anchors, is_outermost=is_outermost) for child in node.layers)
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


TOLERANCE = 0.02
TILE = 64
MOST_WIDTH, MOST_REPEAT = 32768, 256
# How far a first search departs from the proportions (depth over width, feed-forward over width), then a second one.
SEARCHES = ((1.6, 4 / 3), (float(MOST_REPEAT), 4.0))


@dataclass(frozen=True)
class FitRow:
    """One derived number: what it is, what it was, what it became, and why."""

    what: str
    before: str
    after: str
    why: str


@dataclass(frozen=True)
class FitResult:
    """A fitted model with its derivation; `params` counts every trainable element of `model`."""

    model: ModelConfig
    target_params: int
    block_size: int | None
    params: int
    rows: tuple[FitRow, ...]

    @property
    def error(self) -> float:
        """Signed distance from the target, as a share of it."""
        return self.params / self.target_params - 1.0

    @property
    def note(self) -> str:
        """The derivation in one line, for a manifest's notes."""
        steps = ", ".join(f"{row.what} {row.before} -> {row.after}" for row in self.rows)
        return f"fitted to {short_count(self.target_params)} parameters: {steps}"


def fit(model: ModelConfig, target_params: int, block_size: int | None = None) -> FitResult:
    """Scale a model until its parameters, embedder and head counted, are within 2% of a target.

    Vocabulary, embedder type, width per head and grouping are kept. d_model takes multiples of 64 where the head
    counts allow it, d_ff too where the target allows it. Among all widths and depths that reach the target the one
    nearest to the preset's proportions is taken: d_model / depth and d_ff / d_model. A teacher described in the
    model is scaled alike, so that its layers still pair with the student's.

    Args:
        model: the preset.
        target_params: trainable elements to reach.
        block_size: context that the model is for; learned positions get this many rows.

    Raises:
        ConfigError: weights that fix the model's shape, widths that cannot be scaled, or a target out of reach, with
            the smallest and largest, or the nearest, that can be reached.
    """
    _refuse_weights(model)
    reach = _Reach(model, block_size)
    smallest, largest = (reach.params(scale) for scale in reach.ends())
    searches = SEARCHES if smallest <= target_params <= largest else ()
    for depth_slack, ffn_slack in searches:
        found = reach.search(target_params, depth_slack, ffn_slack)
        if found is not None:
            return _result(model, found, target_params, block_size)
    raise ConfigError(reach.refusal(target_params))


def _refuse_weights(model: ModelConfig) -> None:
    if model.path is not None:
        raise ConfigError(
            f"fit: model.path={model.path} brings weights, whose shapes cannot change; remove fit, or choose a model "
            "that is described here (model=baseline)"
        )
    given = {"model.checkpoint": model.checkpoint}
    if model.teacher is not None:
        given["model.teacher.checkpoint"] = model.teacher.checkpoint
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"fit: {name}={value} brings weights, whose shapes cannot change; remove fit, or train a model of "
                f"this size from scratch ({name}=null)"
            )


class _Reach:
    """The widths and depths that a model can take, and how many parameters each of them has."""

    def __init__(self, model: ModelConfig, block_size: int | None) -> None:
        self.spec = ModelSpec.model_validate(
            {name: getattr(model, name) for name in ModelSpec.model_fields}  # without teacher and surgery
        )
        self.block_size = block_size
        self.width = model.embedder.d_model
        nodes = list(_nodes(model.topology))
        heads = [node.n_kv_heads or node.n_heads for node in nodes if isinstance(node, AttentionLayerConfig)]
        self.repeat = next((node.repeat for node in nodes if isinstance(node, NestedTopologyConfig)), None)
        self.ffn = next((node.d_ff for node in nodes if isinstance(node, SwiGLULayerConfig)), None)
        # At multiples of this every width and every head count of the network is a whole number.
        whole = self.width // math.gcd(self.width, *heads, *(w for node in nodes for w in widths_of(node)))
        self.unit = math.lcm(whole, 8)
        self.known: dict[Scale, int] = {}
        self.corners: dict[int, tuple[int, list[int]]] = {}

    def params(self, scale: Scale) -> int:
        if scale not in self.known:
            try:
                self.known[scale] = model_cost(scale_spec(self.spec, scale, self.block_size)).params
            except ValidationError as error:
                raise ConfigError(
                    f"fit: the model cannot be scaled to {scale.label}: {error.errors()[0]['msg']}"
                ) from None
        return self.known[scale]

    def estimate(self, d_model: int, repeat: int | None, d_ff: int | None) -> float:
        """Return the parameters by interpolation: at one width they are linear in depth and in d_ff.

        Exact where one repeat and one feed-forward width is all there is; others follow it by rounding.
        """
        if d_model not in self.corners:
            repeats = (None, None) if self.repeat is None else (self.repeat, 2 * self.repeat)
            even = None if self.ffn is None else self._ffn(d_model, 1.0, 8)
            widths = (None, None) if even is None else (even, 2 * even)
            counts = [self.params(Scale(self.width, d_model, r, f)) for r in repeats for f in widths]
            self.corners[d_model] = (even or 1, counts)
        even, (base, fat, deep, both) = self.corners[d_model]
        x = 0.0 if self.repeat is None or repeat is None else repeat / self.repeat - 1.0
        y = 0.0 if d_ff is None else d_ff / even - 1.0
        return base + x * (deep - base) + y * (fat - base) + x * y * (both - deep - fat + base)

    def search(self, target: int, depth_slack: float, ffn_slack: float) -> Scale | None:
        """Return the scale within tolerance that departs least from the proportions, or None."""
        best: tuple[float, Scale] | None = None
        for d_model in self._widths(target, depth_slack, ffn_slack):
            even_depth = self._even_depth(d_model)
            even_ffn = (self.ffn or 1) * d_model / self.width
            for repeat in self._repeats(even_depth, depth_slack):
                for d_ff in self._closing(target, d_model, repeat, ffn_slack):
                    distortion = abs(math.log2((repeat or 1) / even_depth))
                    distortion += 2 * abs(math.log2((d_ff or even_ffn) / even_ffn))
                    # Between equals, whole tiles of 64, and then the nearer count.
                    distortion += 0.1 * (d_model % TILE != 0)
                    distortion += abs(self.estimate(d_model, repeat, d_ff) / target - 1.0)
                    scale = Scale(self.width, d_model, repeat, d_ff)
                    if (best is None or distortion < best[0]) and self._reaches(scale, target):
                        best = (distortion, scale)
        return None if best is None else best[1]

    def refusal(self, target: int) -> str:
        """Say what can be reached: the ends of the range, or the counts next to a target that falls in a gap."""
        low, high = self.ends()
        smallest, largest = self.params(low), self.params(high)
        head = f"fit.target_params={target:,} cannot be reached from {self.spec.name or self.spec.type}"
        kept = f"its vocabulary of {self.spec.embedder.vocab_size:,} and its width per head are kept"
        if target < smallest:
            return f"{head}: the smallest is {format_count(smallest)} parameters ({low.label}), since {kept}"
        if target > largest:
            return f"{head}: the largest is {format_count(largest)} parameters ({high.label})"
        near = min(self.known.values(), key=lambda count: abs(count - target))
        return (
            f"{head} within {TOLERANCE:.0%}: the nearest is {format_count(near)}; it ranges from "
            f"{short_count(smallest)} to {short_count(largest)}"
        )

    def ends(self) -> tuple[Scale, Scale]:
        """Return the smallest and the largest scale."""
        one, most = (None, None) if self.repeat is None else (1, MOST_REPEAT)
        widest = MOST_WIDTH // self.unit * self.unit
        thin = None if self.ffn is None else self._ffn(self.unit, 1.0 / SEARCHES[-1][1], 8)
        wide = None if self.ffn is None else self._ffn(widest, SEARCHES[-1][1], TILE)
        return Scale(self.width, self.unit, one, thin), Scale(self.width, widest, most, wide)

    def _widths(self, target: int, depth_slack: float, ffn_slack: float) -> Iterator[int]:
        """Yield the widths at which some depth and feed-forward within the slack may reach the target."""
        for d_model in range(self.unit, MOST_WIDTH + 1, self.unit):
            if d_model > 256 and d_model % TILE and TILE % self.unit == 0:
                continue
            repeats = self._repeats(self._even_depth(d_model), depth_slack)
            thin, fat = (self.ffn and self._ffn(d_model, x, 8) for x in (1 / ffn_slack, ffn_slack))
            if not repeats or self.estimate(d_model, repeats[0], thin) > target * (1 + TOLERANCE):
                return
            if self.estimate(d_model, repeats[-1], fat) >= target * (1 - TOLERANCE):
                yield d_model

    def _even_depth(self, d_model: int) -> float:
        return 1.0 if self.repeat is None else self.repeat * d_model / self.width

    def _repeats(self, even: float, slack: float) -> list[int | None]:
        if self.repeat is None:
            return [None]
        first, last = max(1, math.ceil(even / slack)), min(MOST_REPEAT, max(1, math.floor(even * slack)))
        return list(range(first, last + 1))

    def _closing(self, target: int, d_model: int, repeat: int | None, slack: float) -> Iterator[int | None]:
        """Yield feed-forward widths that should reach the target: in proportion, in whole tiles, in eighths."""
        if self.ffn is None:
            if self._is_near(self.estimate(d_model, repeat, None), target):
                yield None
            return
        even = self._ffn(d_model, 1.0, 8)
        small, large = (self.estimate(d_model, repeat, even * times) for times in (1, 2))
        wanted = 1.0 + (target - small) / max(large - small, 1.0)
        for ratio, multiple in ((1.0, TILE), (wanted, TILE), (wanted, 8)):
            if 1.0 / slack <= ratio <= slack:
                d_ff = self._ffn(d_model, ratio, multiple)
                if self._is_near(self.estimate(d_model, repeat, d_ff), target):
                    yield d_ff
                    return

    def _ffn(self, d_model: int, ratio: float, multiple: int) -> int:
        assert self.ffn is not None
        return max(multiple, round(self.ffn * d_model / self.width * ratio / multiple) * multiple)

    @staticmethod
    def _is_near(count: float, target: int) -> bool:
        return abs(count - target) <= TOLERANCE * target

    def _reaches(self, scale: Scale, target: int) -> bool:
        return self._is_near(self.params(scale), target)


def _result(model: ModelConfig, scale: Scale, target: int, block_size: int | None) -> FitResult:
    """Build the fitted model and read the derivation off it, so that the table shows what is there."""
    spec = scale_spec(model, scale, block_size)
    changes: dict[str, Any] = {"embedder": spec.embedder, "topology": spec.topology}
    if model.teacher is not None and model.teacher.manifest is not None:
        if model.teacher.manifest.embedder.d_model != model.embedder.d_model:
            raise ConfigError(
                f"fit: the teacher is {model.teacher.manifest.embedder.d_model} wide and the student "
                f"{model.embedder.d_model}, so one scale cannot fit both; remove fit or give them one width"
            )
        described = scale_spec(model.teacher.manifest, scale, block_size)
        changes["teacher"] = model.teacher.model_copy(update={"manifest": described})
    if model.surgery is not None:
        changes["surgery"] = scale_surgery(model.surgery, scale)
    fitted = ModelConfig.model_validate(
        {**{name: getattr(model, name) for name in ModelConfig.model_fields}, **changes}
    )
    params = model_cost(fitted).params
    rows = tuple(_rows(model, fitted, scale))
    before = model_cost(model).params
    rows += (
        FitRow(
            "parameters",
            f"{before:,}",
            f"{params:,}",
            f"{params / target - 1.0:+.2%} of {short_count(target)}, embedder and head counted",
        ),
    )
    return FitResult(fitted, target, block_size, params, rows)


def _rows(model: ModelSpec, fitted: ModelSpec, scale: Scale) -> Iterator[FitRow]:
    old, new = model.embedder, fitted.embedder
    yield FitRow("vocab_size", f"{old.vocab_size:,}", f"{new.vocab_size:,}", "kept, as is the embedder")
    if old.max_positions != new.max_positions:
        yield FitRow("max_positions", str(old.max_positions), str(new.max_positions), "fit.block_size")
    yield FitRow("d_model", str(old.d_model), str(new.d_model), "whole heads of the preset's width per head")
    seen: set[tuple[str, str, str]] = set()
    for first, second in zip(_nodes(model.topology), _nodes(fitted.topology), strict=True):
        for row in _node_rows(first, second, scale):
            if (row.what, row.before, row.after) not in seen:
                seen.add((row.what, row.before, row.after))
                yield row


def _node_rows(old: Any, new: Any, scale: Scale) -> Iterator[FitRow]:
    if isinstance(old, NestedTopologyConfig) and old.repeat != new.repeat:
        ratios = f"{old.repeat / scale.d_model:.3g} -> {new.repeat / scale.to_d_model:.3g}"
        yield FitRow("repeat", str(old.repeat), str(new.repeat), f"blocks over d_model {ratios}")
    elif isinstance(old, SwiGLULayerConfig):
        ratios = f"{old.d_ff / old.d_model:.3g} -> {new.d_ff / new.d_model:.3g}"
        yield FitRow("d_ff", str(old.d_ff), str(new.d_ff), f"d_ff over d_model {ratios}")
    elif isinstance(old, AttentionLayerConfig):
        for name, why in scalable(old):
            yield FitRow(name, str(getattr(old, name)), str(getattr(new, name)), why)


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    if isinstance(node, TopologyConfig):
        for child in node.layers:
            yield from _nodes(child)


__all__ = ["FitResult", "FitRow", "fit"]
