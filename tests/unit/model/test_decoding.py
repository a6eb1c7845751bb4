"""Cached decoding in any chunking equals the full forward, for every attention and any topology."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_specs import ATTENTION, SPECS, VOCAB, attention, block, spec, transformer
from tests.examples import examples
from torch import Tensor

from caramba.cache import KVCacheKind
from caramba.config.model import ModelSpec
from caramba.errors import ConfigError
from caramba.model import Model, build_model

TOLERANCE = 1e-5


def tokens_of(n: int, batch: int = 2) -> Tensor:
    return torch.randint(VOCAB, (batch, n), generator=torch.Generator().manual_seed(n))


def lively(model_spec: ModelSpec) -> Model:
    """A model whose gates, temperatures and norms are away from their neutral values."""
    model = build_model(model_spec, seed=3).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def assert_chunks_equal(model: Model, tokens: Tensor, cuts: list[int]) -> None:
    with torch.no_grad():
        full = model(tokens)
        ctx = model.new_context(tokens.shape[0], tokens.shape[1])
        parts = torch.tensor_split(tokens, sorted(set(cuts)), dim=1)
        out = torch.cat([model(part, ctx) for part in parts if part.shape[1]], dim=1)
    assert ctx.position == tokens.shape[1]
    torch.testing.assert_close(out, full, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("cuts", [[], list(range(1, 9)), [4], [1, 2, 6], [8]])
@pytest.mark.parametrize("name", ATTENTION)
def test_every_attention_in_every_chunking(name: str, cuts: list[int]) -> None:
    assert_chunks_equal(lively(transformer(name)), tokens_of(9), cuts)


@pytest.mark.parametrize("name", ["standard", "window", "decoupled_gate"])
@pytest.mark.parametrize("type", ["CyclicTopology", "RecurrentTopology", "ParallelTopology"])
def test_topologies_that_share_or_fan_out(type: str, name: str) -> None:
    if type == "ParallelTopology":
        reduce = {"type": "LinearLayer", "d_in": 16, "d_out": 16, "reduce": "mean"}
        layers = [{"type": type, "layers": [block(name), block("decoupled")]}, reduce, attention(name)]
    else:
        key = "n_cycles" if type == "CyclicTopology" else "steps"
        layers = [{"type": type, "layers": [block(name)], key: 3}, block(name)]
    model = lively(spec(*layers, max_positions=12))
    assert_chunks_equal(model, tokens_of(9), [3, 4, 5])


@settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(model_spec=SPECS, cuts=st.lists(st.integers(0, 7), max_size=4))
def test_random_topologies_in_random_chunks(model_spec: ModelSpec, cuts: list[int]) -> None:
    assert_chunks_equal(lively(model_spec), tokens_of(7), cuts)


@pytest.mark.parametrize("name", ["standard", "window", "decoupled_gate"])
def test_truncate_then_redo_equals(name: str) -> None:
    model, tokens = (
        lively(spec({"type": "CyclicTopology", "layers": [block(name)], "n_cycles": 2})),
        tokens_of(9),
    )
    other = (tokens + 1) % VOCAB
    ctx = model.new_context(2, 9)
    with torch.no_grad():
        model(torch.cat((tokens[:, :4], other[:, 4:]), dim=1), ctx)
        ctx.truncate(4)
        out = model(tokens[:, 4:], ctx)
        torch.testing.assert_close(out, model(tokens)[:, 4:], rtol=TOLERANCE, atol=TOLERANCE)


def test_a_window_forgets() -> None:
    model, tokens = lively(spec(attention("window"))), tokens_of(9)
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % VOCAB
    with torch.no_grad():
        difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))
    assert (difference[:3] > 0).all()
    assert (difference[3:] == 0).all()


@pytest.mark.parametrize(("kind", "bound"), [(KVCacheKind.FP16, 2e-3), (KVCacheKind.BF16, 2e-2)])
@pytest.mark.parametrize("name", ["standard", "decoupled"])
def test_half_precision_caches_stay_near(name: str, kind: KVCacheKind, bound: float) -> None:
    model, tokens = build_model(transformer(name), seed=0).eval(), tokens_of(9)
    with torch.no_grad():
        ctx = model.new_context(2, 9, kind)
        out = torch.cat([model(part, ctx) for part in tokens.split(2, dim=1)], dim=1)
        full = model(tokens)
    assert 0 < (out - full).abs().max() < bound


def test_context_bytes_follow_the_dims() -> None:
    model = build_model(spec({"type": "CyclicTopology", "layers": [block("decoupled")], "n_cycles": 3}))
    ctx = model.new_context(2, 40, KVCacheKind.BF16, static=True)
    assert len(ctx.caches) == 3
    assert ctx.bytes_per_token == 3 * (4 + 8 + 6) * 2
    assert ctx.nbytes() == 2 * 40 * ctx.bytes_per_token
    growing = model.new_context(2, 40, KVCacheKind.BF16)
    assert growing.nbytes() == 0
    with torch.no_grad():
        model(tokens_of(17), growing)
    assert growing.nbytes() == 2 * 17 * ctx.bytes_per_token
    with torch.no_grad():
        model(tokens_of(1), growing)
    assert growing.nbytes() == 2 * 34 * ctx.bytes_per_token
    assert growing.used_bytes() == 2 * 18 * ctx.bytes_per_token


def test_misuse_is_named() -> None:
    model = build_model(spec(block("standard"), max_positions=6), seed=0)
    tokens = tokens_of(4)
    with pytest.raises(ConfigError, match=r"reaches 7 tokens, max_positions=6"):
        model(tokens_of(7))
    with pytest.raises(ConfigError, match=r"cannot store a tensor that autograd follows"):
        model(tokens, model.new_context(2, 8))
    with pytest.raises(ConfigError, match=r"tokens have shape \(4,\), expected \[B, T\]"):
        model(tokens[0])
    with torch.no_grad():
        with pytest.raises(ConfigError, match=r"expected \[3, 4, 4, 4\]"):
            model(tokens, model.new_context(3, 8))
        ctx = model.new_context(2, 5)
        full = model(tokens_of(5))
        model(tokens_of(5)[:, :4], ctx)
        with pytest.raises(ConfigError, match=r"6 tokens do not fit max_tokens=5"):
            model(tokens[:, :2], ctx)
        # The failed forward left nothing behind.
        torch.testing.assert_close(model(tokens_of(5)[:, 4:], ctx), full[:, 4:], rtol=1e-5, atol=1e-5)
