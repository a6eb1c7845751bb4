"""Planned FLOPs equal those that torch counts, for random topologies, under the convention of `flops_per_token`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from model_specs import VOCAB, block, spec
from random_specs import deep_specs
from tests.examples import examples
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from caramba.config.estimate import model_cost
from caramba.config.model import ModelSpec
from caramba.layer.attention import AttentionLayer
from caramba.model import Model, build_model

N_TOPOLOGIES, LENGTHS = examples(50), (1, 64)


class SeenPairs(TorchFunctionMode):
    """FLOPs of scores and values over the pairs that masks leave, from the tensors that reach the score op.

    torch's counter multiplies every query with every key. `hidden` is what it counts beyond the pairs that a query
    sees, and for zeros that make values as wide as keys.
    """

    def __init__(self, model: Model, counter: FlopCounterMode) -> None:
        super().__init__()
        self.hidden, self._counter, self._seen, self._before, self._widths = 0, counter, 0, 0, 0
        for layer in model.modules():
            if isinstance(layer, AttentionLayer):
                layer.score.register_forward_pre_hook(self._begin(layer))
                layer.score.register_forward_hook(self._end)

    def _begin(self, layer: AttentionLayer) -> Any:
        def hook(score: nn.Module, args: tuple[Any, ...]) -> None:
            q, k, v = args[:3]
            # Absorbed, the key is the value too: its geometric part is no value, and is dropped.
            is_dropped = v is k and not layer.dims.first_tokens
            self._widths = q.shape[-1] + (layer.dims.v if is_dropped else v.shape[-1])
            # As many queries as keys, where a key represents the first tokens: that key has a query of zeros.
            has_extra = layer.dims.first_tokens > 0 and q.shape[2] == k.shape[2]
            self._seen = -2 * layer.dims.n_heads * self._widths if has_extra else 0
            self._before = self._counter.get_total_flops()

        return hook

    def _end(self, score: nn.Module, args: tuple[Any, ...], out: torch.Tensor) -> None:
        self.hidden += self._counter.get_total_flops() - self._before - self._seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            q, k, mask = args[0], args[1], kwargs.get("attn_mask")
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool) if mask is None else mask
            seen = seen.tril() if kwargs.get("is_causal") else seen
            seen = seen.expand(*q.shape[:3], k.shape[2])
            self._seen += 2 * int(seen.sum()) * self._widths
        return func(*args, **kwargs)


def counted_flops(model: Model, n_tokens: int) -> int:
    """FLOPs of one forward over one sequence, masked pairs left out."""
    tokens = torch.randint(VOCAB, (1, n_tokens), generator=torch.Generator().manual_seed(n_tokens))
    counter = FlopCounterMode(display=False)
    pairs = SeenPairs(model, counter)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter, pairs:
        model(tokens)
    hidden_first = 0
    for work in model_cost(model.spec).topology.attention:
        n = min(work.first, n_tokens)
        hidden_first += n * (n - 1) // 2 * 2 * work.first_width  # earlier queries of later first tokens
    return counter.get_total_flops() - pairs.hidden - hidden_first


def assert_planned(model_spec: ModelSpec) -> None:
    cost = model_cost(model_spec)
    for length in LENGTHS:
        model = build_model(model_spec, seed=3).eval()
        assert counted_flops(model, length) == round(length * cost.flops_per_token(length)), length


@settings(
    max_examples=N_TOPOLOGIES,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(model_spec=deep_specs(max_positions=64))
def test_flops_of_a_random_topology_equal_the_count(model_spec: ModelSpec) -> None:
    assert_planned(model_spec)


@pytest.mark.parametrize(
    ("name", "null_attn"),
    [
        ("latent", False),
        ("latent", True),
        ("latent_gate", True),
        ("latent_first", False),
        ("latent_first_narrow", False),
    ],
)
def test_flops_of_a_latent_layer_equal_the_count(name: str, null_attn: bool) -> None:
    layers = block(name, null_attn=null_attn)
    assert_planned(spec({"type": "NestedTopology", "layers": [layers], "repeat": 2}))
