"""Widths of every layer under one budget of cache bytes, by the block error that each choice makes on held-out text.

Per layer the error over cached elements gives a curve; on its lower convex hull the marginal gains fall, so taking the
largest gain per element of any layer, until the budget is spent, is the Lagrangian optimum up to one step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from caramba.config.attention import AttentionLayerConfig
from caramba.config.model import ModelSpec
from caramba.config.surgery import BYTES_PER_ELEMENT
from caramba.config.topology import (
    NestedTopologyConfig,
    SequentialTopologyConfig,
    TopologyConfig,
    attention_configs,
)
from caramba.errors import ConfigError
from caramba.layer import AttentionLayer
from caramba.model import Model
from caramba.model.topology.base import attention_applications
from caramba.surgery.calibration import Calibration
from caramba.surgery.collect import LayerStatistics
from caramba.surgery.dba import split_keys
from caramba.surgery.held_out import EvalWindows, latent_output, per_head_output
from caramba.surgery.latent import latent_maps
from caramba.surgery.per_head import per_head_maps

STEPS = tuple(sorted({2**n for n in range(13)} | {3 * 2**n for n in range(11)}))
"""Widths that are tried: 1, 2, 3, 4, 6, 8, 12 and so on to 4096."""
REACH = 3  # no layer gets more than this many times its equal share


@dataclass(frozen=True)
class Choice:
    """Widths that a layer may have, the elements that they cache per token, and their squared relative block error."""

    elements: int
    damage: float
    widths: tuple[tuple[str, int], ...]


def lower_hull(choices: Sequence[Choice]) -> list[Choice]:
    """Return the choices on the lower convex hull of damage over elements, in order, damage strictly falling."""
    hull: list[Choice] = []
    for choice in sorted(choices, key=lambda item: (item.elements, item.damage)):
        if hull and choice.damage >= hull[-1].damage:
            continue
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-2], choice):
            hull.pop()
        hull.append(choice)
    return hull


def _gain(before: Choice, after: Choice) -> float:
    return (before.damage - after.damage) / (after.elements - before.elements)


def allocate(curves: Sequence[Sequence[Choice]], elements: int, *, unit_bytes: int = BYTES_PER_ELEMENT) -> list[Choice]:
    """Choose one point of each layer's curve so that all together cache at most `elements`, with the least damage.

    `unit_bytes` is the size of an element in a message: curves over bytes have 1.

    Raises:
        ConfigError: the layers' smallest choices exceed the budget.
    """
    hulls = [lower_hull(curve) for curve in curves]
    at = [0] * len(hulls)
    left = elements - sum(hull[0].elements for hull in hulls)
    if left < 0:
        raise ConfigError(
            f"surgery.kv_budget_bytes: {unit_bytes * elements} bytes per token are below the least that the layers can "
            f"cache; the nearest possible is {unit_bytes * (elements - left)} bytes"
        )
    while True:
        steps = [
            (_gain(hull[index], hull[index + 1]), layer)
            for layer, (hull, index) in enumerate(zip(hulls, at, strict=True))
            if index + 1 < len(hull) and hull[index + 1].elements - hull[index].elements <= left
        ]
        if not steps:
            return [hull[index] for hull, index in zip(hulls, at, strict=True)]
        _, layer = max(steps, key=lambda step: (step[0], -step[1]))
        hull, index = hulls[layer], at[layer]
        left -= hull[index + 1].elements - hull[index].elements
        at[layer] += 1


@torch.no_grad()
def fit_widths(teacher: Model, spec: ModelSpec, calibration: Calibration, budget_bytes: int) -> ModelSpec:
    """Return the student's spec with the widths of every attention layer chosen under `budget_bytes` per token.

    The budget counts all layers at 16 bits. Repeated blocks are written out, each with widths of its own.

    Raises:
        ConfigError: the budget is below what the layers need, or weights are shared between applications.
    """
    layers = teacher.attention_layers()
    if len(layers) != len(list(attention_applications(teacher))):
        raise ConfigError("surgery.kv_budget_bytes: a layer runs more than once, and its caches share one width")
    elements = budget_bytes // BYTES_PER_ELEMENT
    configs = attention_configs(spec.topology)
    most = max(REACH * elements // len(layers), 16)
    curves = [
        _curve(layer, config, *calibration.of(layer), most) for (_, layer), config in zip(layers, configs, strict=True)
    ]
    chosen = [dict(choice.widths) for choice in allocate(curves, elements)]
    return spec.model_copy(update={"topology": unroll(spec.topology, iter(chosen))})


def _curve(
    layer: AttentionLayer,
    config: AttentionLayerConfig,
    statistics: LayerStatistics,
    held: EvalWindows,
    most: int,
) -> list[Choice]:
    if config.layout == "latent":
        return _latent_curve(layer, statistics, held, most, config.exact_first_tokens)
    return _per_head_curve(layer, config, statistics, held, most)


def _latent_curve(
    layer: AttentionLayer, statistics: LayerStatistics, held: EvalWindows, most: int, first_tokens: int
) -> list[Choice]:
    """Measure latents of many widths for each geometric width: one eigenbasis serves all of them."""
    dims = layer.dims
    keys, joint = dims.n_kv_heads * dims.qk, len(statistics.mean)
    choices = []
    for geo in (step for step in STEPS if step % 2 == 0 and step <= min(keys, most)):
        widest = min(joint, most)
        maps = latent_maps(layer, statistics, split_keys(layer, statistics, geo), statistics.queries, widest, 1.0)
        for rank in (step for step in STEPS if step <= widest and step + geo <= most and is_sane(step, geo)):
            damage = held.relative(latent_output(held, maps.truncate(rank), first_tokens)) ** 2
            choices.append(Choice(rank + geo, damage, (("sem_dim", rank), ("geo_dim", geo))))
    return choices


def is_sane(rank: int, geo: int) -> bool:
    """Leave out splits that no layer has been seen to want: they are half of all."""
    return geo <= 2 * rank + 2 and rank <= 16 * geo


def _per_head_curve(
    layer: AttentionLayer,
    config: AttentionLayerConfig,
    statistics: LayerStatistics,
    held: EvalWindows,
    most: int,
) -> list[Choice]:
    """Measure key widths with whole values and value widths with whole keys; their damages are taken to add up."""
    dims, kv_heads = layer.dims, layer.dims.n_kv_heads
    centres = config.bias is True

    def damage(sem: int, geo: int, v: int) -> float:
        maps = per_head_maps(layer, statistics, statistics.queries, (sem, geo, v), centres_values=centres)
        return held.relative(per_head_output(held, maps)) ** 2

    steps = [step for step in STEPS if step <= most // kv_heads]
    values = {v: damage(1, dims.qk, v) for v in steps if v <= dims.v}
    keys = {
        (sem, geo): damage(sem, geo, dims.v)
        for geo in steps
        if geo % 2 == 0 and geo <= dims.qk
        for sem in steps
        if sem <= dims.qk
    }
    return [
        Choice(
            kv_heads * (sem + geo + v),
            key_damage + value_damage,
            (("sem_dim", kv_heads * sem), ("geo_dim", kv_heads * geo), ("v_dim", kv_heads * v)),
        )
        for (sem, geo), key_damage in keys.items()
        for v, value_damage in values.items()
    ]


def unroll(node: Any, widths: Any) -> Any:
    """Return the tree with the next widths of the iterator in each attention layer, repeats written out.

    A written-out repeat keeps the names of its weights: node i of repeat r is layers[r * n + i] in both.
    """
    if isinstance(node, AttentionLayerConfig):
        return AttentionLayerConfig.model_validate({**node.model_dump(mode="json"), **next(widths)})
    if not isinstance(node, TopologyConfig) or not attention_configs(node):
        return node
    if isinstance(node, NestedTopologyConfig):
        layers = tuple(unroll(child, widths) for _ in range(node.repeat) for child in node.layers)
        return SequentialTopologyConfig(layers=layers)
    return node.model_copy(update={"layers": tuple(unroll(child, widths) for child in node.layers)})
