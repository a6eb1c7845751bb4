"""Auto-fit: targets are met within two per cent in the preset's proportions, and what cannot be is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from caramba.config.attention import AttentionLayerConfig
from caramba.config.estimate import as_json, check_widths, fit, model_cost, plan, render_text
from caramba.config.layer import SwiGLULayerConfig
from caramba.config.model import FitConfig, ModelConfig, parse_count
from caramba.config.topology import NestedTopologyConfig, TopologyConfig
from caramba.errors import ConfigError
from tests.unit.config.estimate.presets import compose_model, manifest

NORM = {"type": "RMSNormLayer", "d_model": 64}


def untied_from_weights(preset: str) -> ModelConfig:
    """A preset whose teacher is trained here, so that its shapes are free."""
    model = compose_model(preset)
    if model.teacher is None:
        return model
    return model.model_copy(update={"teacher": model.teacher.model_copy(update={"checkpoint": None})})


def nodes(model: ModelConfig, kind: type) -> list:
    def walk(node):
        yield node
        for child in node.layers if isinstance(node, TopologyConfig) else ():
            yield from walk(child)

    return [node for node in walk(model.topology) if isinstance(node, kind)]


@pytest.mark.parametrize(
    ("preset", "target"),
    [
        ("tiny", 1_000_000),
        ("tiny", 150_000_000),
        ("tiny_dba", 20_000_000),
        ("tiny_dba_per_head", 20_000_000),
        ("dba", 3_000_000),
        ("llama32_1b", 150_000_000),
        ("llama32_1b", 3_000_000_000),
        ("llama32_dba", 300_000_000),
        ("llama32_dba_per_head", 400_000_000),
        ("llama_block", 320_000_000),
    ],
)
def test_meets_the_target_and_keeps_the_conventions(preset, target):
    before = untied_from_weights(preset)
    result = fit(before, target, 1024)
    after = result.model
    assert result.params == model_cost(after).params
    assert abs(result.params - target) <= 0.02 * target
    assert result.error == pytest.approx(result.params / target - 1)
    check_widths(after)
    assert after.embedder.vocab_size == before.embedder.vocab_size
    assert after.embedder.d_model % 64 == 0
    scale = after.embedder.d_model / before.embedder.d_model
    for old, new in zip(nodes(before, AttentionLayerConfig), nodes(after, AttentionLayerConfig), strict=True):
        assert new.n_heads == old.n_heads * scale
        assert new.n_heads * (old.n_kv_heads or old.n_heads) == old.n_heads * (new.n_kv_heads or new.n_heads)
        if old.layout == "per_head":
            assert (new.dims().qk, new.dims().v, new.dims().rope) == (
                old.dims().qk,
                old.dims().v,
                old.dims().rope,
            )
        unchanged = {"d_model", "n_heads", "n_kv_heads", "sem_dim", "geo_dim", "v_dim"}
        assert new.model_dump(exclude=unchanged) == old.model_dump(exclude=unchanged)
    for old, new in zip(nodes(before, SwiGLULayerConfig), nodes(after, SwiGLULayerConfig), strict=True):
        assert 0.7 < (new.d_ff / new.d_model) / (old.d_ff / old.d_model) < 1.45
        assert new.d_ff % 8 == 0
    for old, new in zip(nodes(before, NestedTopologyConfig), nodes(after, NestedTopologyConfig), strict=True):
        assert new.repeat >= 1
        assert 0.5 < new.repeat / old.repeat / scale < 2
    if before.teacher is not None:
        assert after.teacher.manifest.embedder == after.embedder
        assert len(model_cost(after.teacher.manifest).kv_layers) == len(model_cost(after).kv_layers)


@settings(max_examples=15, deadline=None)
@given(st.integers(300_000, 500_000_000))
def test_any_target_in_reach_is_met(target):
    assert abs(fit(compose_model("tiny"), target).params - target) <= 0.02 * target


def test_the_preset_itself_comes_back_unchanged():
    model = compose_model("llama32_1b")
    assert fit(model, model_cost(model).params).model == model


def test_fitting_is_deterministic_and_goes_into_the_surgery():
    model = untied_from_weights("llama32_dba")
    first, second = fit(model, 300_000_000), fit(model, 300_000_000)
    assert first == second
    attention = nodes(first.model, AttentionLayerConfig)[0]
    surgery = first.model.surgery
    assert (surgery.sem_dim, surgery.geo_dim) == (attention.sem_dim, attention.geo_dim)


def test_learned_positions_take_the_block_size():
    model = ModelConfig.model_validate(
        {
            "embedder": {"vocab_size": 100, "d_model": 64, "type": "token_position", "max_positions": 32},
            "topology": {
                "type": "StackedTopology",
                "layers": [
                    {
                        "type": "NestedTopology",
                        "repeat": 2,
                        "layers": [
                            {
                                "type": "ResidualTopology",
                                "layers": [NORM, {"type": "LinearLayer", "d_in": 64, "d_out": 64}],
                            },
                        ],
                    },
                    NORM,
                ],
            },
        }
    )
    result = fit(model, 1_000_000, 512)
    assert result.model.embedder.max_positions == 512
    assert abs(result.params - 1_000_000) <= 20_000
    assert fit(model, 1_000_000).model.embedder.max_positions == 32


def test_out_of_reach_says_how_far_it_goes():
    tiny = compose_model("tiny")
    with pytest.raises(ConfigError, match=r"target_params=1,000 .* smallest is [\d,]+ \(153K\) .* vocabulary of 2,048"):
        fit(tiny, 1_000)
    with pytest.raises(ConfigError, match=r"the largest is [\d,]+ \(\d.*T\) parameters \(d_model 32768"):
        fit(tiny, 10**16)
    # Width alone moves in steps, between which a target can fall.
    wide = ModelConfig.model_validate(
        {
            "embedder": {"vocab_size": 1000, "d_model": 64},
            "topology": {"type": "StackedTopology", "layers": [NORM]},
        }
    )
    with pytest.raises(ConfigError, match=r"within 2%: the nearest is [\d,]+.*; it ranges from 8.01K to"):
        fit(wide, 12_000)


def test_weights_fix_the_shape():
    with pytest.raises(ConfigError, match=r"model.teacher.checkpoint=meta-llama/Llama-3.2-1B brings weights"):
        fit(compose_model("llama32_dba"), 10**9)
    with pytest.raises(ConfigError, match=r"model.checkpoint=runs/x brings weights"):
        fit(compose_model("tiny").model_copy(update={"checkpoint": "runs/x"}), 10**6)
    with pytest.raises(ConfigError, match=r"model.path=hf/llama brings weights.*remove fit"):
        fit(compose_model("tiny").model_copy(update={"path": "hf/llama"}), 10**6)


@pytest.mark.parametrize(
    ("text", "count"),
    [("150M", 150_000_000), ("1.2B", 1_200_000_000), ("64k", 64_000), (1e8, 100_000_000), (7, 7), ("9", 9)],
)
def test_counts_are_read(text, count):
    assert FitConfig(target_params=text).target_params == count


@pytest.mark.parametrize("text", ["abc", "1.2.3M", "-5M", "", 0, -1, True, 1.5])
def test_other_counts_are_refused(text):
    with pytest.raises(ValidationError):
        FitConfig(target_params=text)
    assert parse_count(None) is None


def test_the_plan_shows_the_derivation():
    result = fit(compose_model("tiny"), 150_000_000, 1024)
    made = manifest("tiny").model_copy(update={"model": result.model})
    text = render_text(plan(made, fit=result))
    assert "Fitted to 150M parameters" in text
    for row in result.rows:
        assert row.what in text
        assert row.after in text
    assert "…" not in text.partition("Model tiny")[0]
    exported = json.loads(json.dumps(as_json(plan(made, fit=result))))["fit"]
    assert exported["params"] == result.params
    assert {
        "what": "n_heads",
        "before": "4",
        "after": "22",
        "why": "query and key width 32 per head kept",
    } in (exported["derivation"])
    assert as_json(plan(made))["fit"] is None
