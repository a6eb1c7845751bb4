"""Variants at matched parameters, for the models that come with caramba and a small one."""

from __future__ import annotations

import pytest

from caramba.config.estimate import check_variants, model_cost, variant
from caramba.config.estimate.variants import feed_forward_widths
from caramba.config.manifest import Manifest
from caramba.config.model import ModelSpec
from caramba.config.parallel import ParallelConfig
from caramba.config.parallel_check import check_parallel
from caramba.config.topology import attention_configs
from caramba.errors import ConfigError
from caramba.launch.freeze import freeze
from tests.unit.surgery.models import spec

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


def manifest_of(model: ModelSpec, *names: str) -> Manifest:
    runs = [
        {"id": f"{name}_run", "exp": name, "train": {"phase": "pretrain", "steps": 1, "trains": "variant"}}
        for name in names
    ]
    group = {"name": "g", "data": {"type": "stdlib", "vocab_size": 512}, "runs": runs}
    return Manifest.model_validate({"name": "x", "model": model.model_dump(mode="json"), "groups": [group]})


def upcast(model: ModelSpec, d_ff: int) -> ModelSpec:
    return ModelSpec.model_validate_json(model.model_dump_json().replace('"d_ff":48', f'"d_ff":{d_ff}'))


def test_a_model_that_cannot_be_matched_is_refused_by_run():
    model = upcast(spec(mode="bottleneck", n_kv_heads=4, head_dim=None, attn_dim=8), 8)
    with pytest.raises(ConfigError, match=r"run 'baseline_run': exp=baseline: matching .* parameters needs d_ff -"):
        check_variants(manifest_of(model, "baseline"))


def test_ranks_share_the_layers_of_the_variant_and_not_of_the_model():
    """As a launch checks it: before anything is started, by the widths that the run trains."""

    def check(model: ModelSpec, tp: int, *names: str) -> None:
        split = ParallelConfig(strategy="fsdp2_tp", tp=tp)
        manifest = manifest_of(model, *names).model_copy(update={"parallel": split})
        check_parallel(manifest)
        check_variants(manifest)

    check(spec(), 2, "gqa")
    with pytest.raises(ConfigError) as caught:
        check(spec(), 2, "gqa", "baseline")
    assert str(caught.value) == (
        "run 'baseline_run': exp=baseline: tensor parallel: 2 ranks cannot share d_ff=37 features; use a multiple of "
        "2, or fewer ranks (model.topology.layers[0].layers[1].layers[1]); the widths of a variant follow from the "
        "model, so change those of the model, or use parallel=fsdp2"
    )
    fits = upcast(spec(), 47)  # it has two key/value heads and an odd d_ff; its baseline four, and d_ff 36
    assert feed_forward_widths(variant(fits, "baseline")) == [36]
    check(fits, 4, "baseline")
