"""Variants at matched parameters, for the models that come with caramba and a small one."""

from __future__ import annotations

import pytest

from caramba.config.manifest import Manifest
from caramba.config.model import ModelSpec
from caramba.config.surgery import attention_configs
from caramba.cost import check_variants, model_cost, variant
from caramba.errors import ConfigError
from caramba.launch.freeze import freeze
from tests.unit.upcycle.models import spec

NAMES = ("baseline", "gqa", "bottleneck", "decoupled")


@pytest.mark.parametrize("option", ["tiny", "llama32_1b", "baseline", "decoupled"])
def test_parameters_agree_and_caches_differ(option: str):
    model = freeze([f"model={option}", "train=pretrain", "verify=none"]).manifest.model
    found = {name: variant(model, name) for name in NAMES}
    costs = {name: model_cost(item) for name, item in found.items()}
    for cost in costs.values():
        assert abs(cost.params / model_cost(model).params - 1) < 0.002
    cached = {name: cost.topology.kv_elements_per_token for name, cost in costs.items()}
    assert cached["bottleneck"] < cached["decoupled"] < cached["baseline"]
    assert cached["gqa"] < cached["baseline"]
    layers = attention_configs(model.topology)
    for item in found.values():
        kept = [(a.n_heads, a.rope_base, a.rope_scaling) for a in attention_configs(item.topology)]
        assert kept == [(a.n_heads, a.rope_base, a.rope_scaling) for a in layers]


def test_a_model_that_cannot_be_matched_is_refused_by_run():
    def with_width(d_ff: int) -> ModelSpec:
        text = spec(mode="bottleneck", n_kv_heads=4, head_dim=None, attn_dim=8).model_dump_json()
        return ModelSpec.model_validate_json(text.replace('"d_ff":48', f'"d_ff":{d_ff}'))

    manifest = Manifest.model_validate(
        {
            "name": "x",
            "model": with_width(8).model_dump(mode="json"),
            "groups": [
                {
                    "name": "g",
                    "data": {"type": "stdlib", "vocab_size": 512},
                    "runs": [
                        {
                            "id": "wide",
                            "exp": "baseline",
                            "train": {"phase": "pretrain", "steps": 1, "trains": "variant"},
                        }
                    ],
                }
            ],
        }
    )
    with pytest.raises(ConfigError, match=r"run 'wide': exp=baseline: matching .* parameters needs d_ff -"):
        check_variants(manifest)
