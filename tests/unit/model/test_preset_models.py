"""Every preset that can be built has the parameters, cache bytes and work of its plan."""

from __future__ import annotations

import pytest
import torch
from tests.unit.config.estimate.presets import PRESETS, compose_model, shrunk_tree
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from caramba.cache import KVCacheKind
from caramba.config.estimate import model_cost
from caramba.config.model import ModelConfig
from caramba.model import build_model

MEMORY = ("tiny_memory",)
"""Caches of constant size, whose op the counter does not see; gates run when a token leaves the window."""


@pytest.mark.parametrize("preset", PRESETS)
def test_parameters_and_cache_equal_the_plan(preset: str) -> None:
    model = compose_model(preset)
    cost, built = model_cost(model), build_model(model, device="meta")
    assert sum(parameter.numel() for parameter in built.parameters()) == cost.params
    ctx = built.new_context(2, 64, KVCacheKind.BF16, static=True)
    assert ctx.bytes_per_token == cost.kv_bytes_per_token(KVCacheKind.BF16)
    assert ctx.nbytes() == 2 * cost.topology.kv_bytes(KVCacheKind.BF16, 64)


@pytest.mark.parametrize("preset", PRESETS)
def test_work_of_a_decode_equals_the_plan(preset: str) -> None:
    """At reduced size: FLOPs of the matrix products that decoding really does, one token at a time."""
    model = ModelConfig.model_validate(shrunk_tree(preset))
    cost = model_cost(model)
    built = build_model(model, seed=0).eval()
    assert sum(parameter.numel() for parameter in built.parameters()) == cost.params
    ctx = built.new_context(1, 5)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        for token in range(5):
            built(torch.tensor([[token]]), ctx)
    n_cached = 10_000 if preset in MEMORY else 5
    assert ctx.used_bytes() == cost.topology.kv_bytes(KVCacheKind.FP32, n_cached)
    if preset not in MEMORY:
        assert counter.get_total_flops() == round(5 * cost.decode_flops_per_token(5))


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
    for preset in ("tiny", "tiny_dba", "tiny_dba_per_head", "dba"):
        model = compose_model(preset)
        built = build_model(model, seed=0).eval()
        with torch.no_grad():
            ctx = built.new_context(1, 16)
            built(torch.zeros(1, 5, dtype=torch.int64), ctx)
        assert ctx.used_bytes() == model_cost(model).topology.kv_bytes(KVCacheKind.FP32, 5)
