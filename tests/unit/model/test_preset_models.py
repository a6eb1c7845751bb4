"""Every preset that can be built has the parameters and cache bytes of its plan."""

from __future__ import annotations

import pytest
import torch
from tests.unit.cost.presets import PRESETS, compose_model

from caramba.cache import KVCacheKind
from caramba.cost import model_cost
from caramba.model import build_model


@pytest.mark.parametrize("preset", PRESETS)
def test_parameters_and_cache_equal_the_plan(preset: str) -> None:
    model = compose_model(preset)
    cost, built = model_cost(model), build_model(model, device="meta")
    assert sum(parameter.numel() for parameter in built.parameters()) == cost.params
    ctx = built.new_context(2, 64, KVCacheKind.BF16, static=True)
    assert ctx.bytes_per_token == cost.kv_bytes_per_token(KVCacheKind.BF16)
    assert ctx.nbytes() == 2 * cost.topology.kv_bytes(KVCacheKind.BF16, 64)


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("llama32_1b", 2048),
        ("llama32_dba_per_head", 1792),
        ("llama32_dba", 768),
        ("llama32_dba_384b", 384),
        ("llama32_dba_320b", 320),
    ],
)
def test_documented_bytes_per_token_and_layer_are_those_of_the_tensors(preset: str, expected: int) -> None:
    ctx = build_model(compose_model(preset), device="meta").new_context(1, 64, KVCacheKind.BF16, static=True)
    assert [cache.allocated_bytes / 64 for cache in ctx.caches] == [expected] * 16


def test_a_small_preset_runs_as_planned() -> None:
    for preset in ("tiny", "tiny_dba", "tiny_dba_latent", "dba"):
        model = compose_model(preset)
        built = build_model(model, seed=0).eval()
        with torch.no_grad():
            ctx = built.new_context(1, 16)
            built(torch.zeros(1, 5, dtype=torch.int64), ctx)
        assert ctx.used_bytes() == model_cost(model).topology.kv_bytes(KVCacheKind.FP32, 5)
