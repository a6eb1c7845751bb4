"""The four attentions of a from-scratch study, each in the manifest's model at matched parameters."""

from __future__ import annotations

from typing import Any

from caramba.config.attention import AttentionLayerConfig
from caramba.config.estimate.model import model_cost
from caramba.config.layer import SwiGLULayerConfig
from caramba.config.manifest import ExperimentName, Manifest
from caramba.config.model import ModelSpec
from caramba.config.parallel import ParallelConfig
from caramba.config.parallel_check import check_layers
from caramba.config.surgery import map_attention
from caramba.config.topology import TopologyConfig
from caramba.errors import ConfigError

TOLERANCE = 0.02
_KEPT = (
    *("type", "d_model", "n_heads", "rope_enabled", "rope_base", "rope_scaling"),
    *("local_window", "q_chunk", "bias", "dropout"),
)


def variant(model: ModelSpec, exp: ExperimentName) -> ModelSpec:
    """Return the model with attention of the kind `exp` in every layer, and as many parameters within 2%.

    d_ff is changed by one number everywhere to reach them.

    With H heads of width D: baseline has H key/value heads, gqa the model's own groups or H / 2, bottleneck attn_dim
    H D / 4, decoupled H D / 8 semantic, H D / 4 geometric and H D / 2 value widths.

    Raises:
        ConfigError: no feed-forward width gives the model's parameters.
    """
    changed = ModelSpec(
        name=exp,
        embedder=model.embedder,
        topology=map_attention(model.topology, lambda layer: _attention(layer, exp)),
        head=model.head,
    )
    target, now = model_cost(model).params, model_cost(changed).params
    slope = model_cost(_widened(changed, 1)).params - now
    if slope == 0:
        raise ConfigError(f"exp={exp}: the model has no SwiGLU layer whose d_ff could match its parameters; add one")
    step = round((target - now) / slope)
    narrowest = min(feed_forward_widths(changed))
    if narrowest + step < 1:
        raise ConfigError(
            f"exp={exp}: matching {target:,} parameters needs d_ff {narrowest + step}; use a model with a wider d_ff"
        )
    matched = _widened(changed, step)
    found = model_cost(matched).params
    if abs(found / target - 1) > TOLERANCE:
        raise ConfigError(
            f"exp={exp}: the nearest to {target:,} parameters is {found:,}, over 2% off; use a larger model"
        )
    return matched


def check_variants(manifest: Manifest) -> None:
    """Derive every variant that a manifest trains, and check that ranks can share its layers, where they are to.

    Raises:
        ConfigError: naming the run whose variant the model does not allow, and the layer that ranks cannot share.
    """
    for group in manifest.groups_to_run():
        for run in group.runs:
            if run.exp is not None:
                try:
                    _check_ranks(variant(manifest.model, run.exp), run.exp, manifest.parallel)
                except ConfigError as error:
                    raise ConfigError(f"run {run.id!r}: {error}") from None


def _check_ranks(spec: ModelSpec, exp: ExperimentName, parallel: ParallelConfig) -> None:
    if parallel.tp == 1:
        return
    try:
        check_layers(spec, parallel.tp, split_sequence=parallel.sequence_parallel)
    except ConfigError as error:
        raise ConfigError(
            f"exp={exp}: {error}; the widths of a variant follow from the model, so change those of the model, or use "
            "parallel=fsdp2"
        ) from None


def feed_forward_widths(node: Any) -> list[int]:
    """Return d_ff of every feed-forward layer of a model or tree, as it is written."""
    if isinstance(node, ModelSpec):
        return feed_forward_widths(node.topology)
    if isinstance(node, SwiGLULayerConfig):
        return [node.d_ff]
    children = node.layers if isinstance(node, TopologyConfig) else ()
    return [width for child in children for width in feed_forward_widths(child)]


def _attention(layer: AttentionLayerConfig, exp: ExperimentName) -> AttentionLayerConfig:
    heads, width = layer.n_heads, layer.head_dim or layer.d_model // layer.n_heads
    kv_heads = layer.n_kv_heads or heads
    grouped = kv_heads if kv_heads < heads else heads // 2 if heads % 2 == 0 else 1
    even = max(2, 2 * (width // 8))  # a quarter of the head, in rotary pairs
    own: dict[str, Any] = {
        "baseline": {"mode": "standard", "head_dim": width},
        "gqa": {"mode": "gqa", "head_dim": width, "n_kv_heads": grouped},
        "bottleneck": {"mode": "bottleneck", "attn_dim": heads * even},
        "decoupled": {
            "mode": "decoupled",
            "sem_dim": heads * max(1, width // 8),
            "geo_dim": heads * even,
            "v_dim": heads * max(1, width // 2),
        },
    }[exp]
    kept = {name: value for name, value in layer.model_dump(mode="json").items() if name in _KEPT}
    return AttentionLayerConfig.model_validate({**kept, **own})


def _widened(model: ModelSpec, step: int) -> ModelSpec:
    return model.model_copy(update={"topology": _widen(model.topology, step)})


def _widen(node: Any, step: int) -> Any:
    if isinstance(node, SwiGLULayerConfig):
        return node.model_copy(update={"d_ff": node.d_ff + step})
    if not isinstance(node, TopologyConfig):
        return node
    return node.model_copy(update={"layers": tuple(_widen(child, step) for child in node.layers)})
