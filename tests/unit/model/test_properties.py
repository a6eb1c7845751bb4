"""Properties of any valid network: it runs, trains, decodes in chunks, and costs what its plan says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_specs import ATTENTION, VOCAB, block, spec, transformer
from random_specs import deep_specs
from tests.examples import examples
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from caramba.cache import KVCacheKind
from caramba.config.estimate import model_cost
from caramba.config.model import ModelSpec
from caramba.model import Model, build_model

N_TOKENS = 6
EXACT = (KVCacheKind.FP32, KVCacheKind.BF16)
KINDS = (*EXACT, KVCacheKind.Q8_0, KVCacheKind.NF4, KVCacheKind.MIXED)


def quick(most: int) -> settings:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=examples(most), deadline=None, suppress_health_check=checks, derandomize=True)


def tokens_of(n: int = N_TOKENS, batch: int = 2) -> Tensor:
    return torch.randint(VOCAB, (batch, n), generator=torch.Generator().manual_seed(n))


def lively(model_spec: ModelSpec) -> Model:
    """A model in which nothing that starts at zero is still there."""
    model, generator = build_model(model_spec, seed=3), torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


@quick(30)
@given(model_spec=deep_specs())
def test_any_topology_trains(model_spec: ModelSpec) -> None:
    model, tokens = lively(model_spec).train(), tokens_of()
    logits = model(tokens)
    assert logits.shape == (*tokens.shape, VOCAB)
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@quick(30)
@given(model_spec=deep_specs(), cuts=st.lists(st.integers(1, N_TOKENS - 1), max_size=4))
def test_any_topology_decodes_in_chunks_and_is_deterministic_in_eval(model_spec: ModelSpec, cuts: list[int]) -> None:
    model, tokens = lively(model_spec).eval(), tokens_of()
    with torch.no_grad():
        full = model(tokens)
        assert torch.equal(model(tokens), full)
        ctx = model.new_context(*tokens.shape)
        parts = torch.tensor_split(tokens, sorted(set(cuts)), dim=1)
        out = torch.cat([model(part, ctx) for part in parts], dim=1)
        # Causal: what follows changes nothing.
        changed = tokens.clone()
        changed[:, -1] = (changed[:, -1] + 1) % VOCAB
        torch.testing.assert_close(model(changed)[:, :-1], full[:, :-1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out, full, rtol=1e-4, atol=1e-4)


def decoding_flops(model: Model, n_tokens: int) -> int:
    """FLOPs of the matrix products that decoding one token at a time really does, for one sequence.

    Each token then reads exactly the keys that causality and its window leave it, as the plan counts; a forward
    over all of them at once multiplies masked pairs too.
    """
    ctx = model.new_context(1, n_tokens)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        for token in tokens_of(n_tokens, batch=1).split(1, dim=1):
            model(token, ctx)
    return counter.get_total_flops()


def assert_costs_agree(model: Model) -> None:
    cost = model_cost(model.spec)
    assert cost.params == sum(parameter.numel() for parameter in model.parameters())
    assert decoding_flops(model, N_TOKENS) == round(N_TOKENS * cost.decode_flops_per_token(N_TOKENS))
    for kind in KINDS:
        with torch.no_grad():
            ctx = model.new_context(2, 8, kind)
            model(tokens_of(), ctx)
        assert ctx.bytes_per_token == cost.kv_bytes_per_token(kind)
        if kind in EXACT:  # a quantised cache still has so few tokens in its 16-bit tail
            assert ctx.used_bytes() == 2 * cost.topology.kv_bytes(kind, N_TOKENS)
        assert tuple(cache.bytes_per_token for cache in ctx.caches) == cost.kv_bytes_per_layer(kind)


@quick(15)
@given(model_spec=deep_specs())
def test_any_topology_costs_what_its_plan_says(model_spec: ModelSpec) -> None:
    assert_costs_agree(lively(model_spec).eval())


@pytest.mark.parametrize("name", ATTENTION)
def test_every_attention_costs_what_its_plan_says(name: str) -> None:
    assert_costs_agree(build_model(transformer(name), seed=0).eval())


@pytest.mark.parametrize("name", ["standard", "gqa_scaled", "bottleneck"])
def test_a_whole_forward_does_the_dense_count(name: str) -> None:
    model = build_model(transformer(name), seed=0).eval()
    cost = model_cost(model.spec)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens_of(batch=1))
    matrices = 2 * N_TOKENS * (cost.topology.matmul_params_used + cost.vocab_size * cost.d_model)
    assert counter.get_total_flops() == matrices + 2 * N_TOKENS**2 * cost.topology.attention_width


def test_a_whole_forward_of_a_wide_latent_gives_every_head_its_keys() -> None:
    model = build_model(transformer("latent"), seed=0).eval()
    cost, layers, heads = model_cost(model.spec), 2, 4
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens_of(batch=1))
    matrices = 2 * N_TOKENS * (cost.topology.matmul_params_used + cost.vocab_size * cost.d_model)
    # Keys are 6 + 4 wide; values, 6 wide, are padded to the same. Absorbed, they would be 12 + 4.
    assert counter.get_total_flops() == matrices + 2 * N_TOKENS**2 * layers * heads * (10 + 10)
    assert {work.forward_width for work in cost.topology.attention} == {heads * (10 + 6)}


def test_dropout_acts_in_training_and_never_in_eval() -> None:
    dropped = block("standard")
    dropped["layers"][0]["layers"][1] |= {"dropout": 0.5}
    model = build_model(spec(dropped, {"type": "DropoutLayer", "p": 0.5}), seed=0)
    plain = build_model(spec(block("standard"), {"type": "DropoutLayer", "p": 0.0}), seed=0).eval()
    tokens = tokens_of()
    with torch.no_grad():
        assert not torch.equal(model.train()(tokens), model(tokens))
        torch.testing.assert_close(model.eval()(tokens), plain(tokens), rtol=0, atol=0)
        ctx = model.new_context(*tokens.shape)
        torch.testing.assert_close(model(tokens, ctx), plain(tokens))
