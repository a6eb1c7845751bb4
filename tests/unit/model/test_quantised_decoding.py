"""Decoding on a quantised cache stays near the full forward, for every kind and attention layout."""

from __future__ import annotations

import pytest
import torch
from model_specs import ATTENTION, VOCAB, transformer
from torch import Tensor

from caramba.cache import KVCacheKind
from caramba.model import Model, build_model

N_TOKENS, TILE = 48, 8
# Root mean square error of the logits over their standard deviation; these networks show up to 0.0086 and 0.143.
BOUND = {KVCacheKind.Q8_0: 0.015, KVCacheKind.NF4: 0.2, KVCacheKind.Q4_0: 0.2, KVCacheKind.MIXED: 0.2}


def tokens_of(n: int = N_TOKENS) -> Tensor:
    return torch.randint(VOCAB, (2, n), generator=torch.Generator().manual_seed(n))


def lively(name: str) -> Model:
    """A model whose attention has a say: every weight is far from its small start."""
    model = build_model(transformer(name), seed=0).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def decoded(model: Model, tokens: Tensor, kind: KVCacheKind, chunk: int, hadamard: bool = False) -> Tensor:
    ctx = model.new_context(2, N_TOKENS, kind, tail_tokens=TILE, hadamard=hadamard)
    return torch.cat([model(part, ctx) for part in tokens.split(chunk, dim=1)], dim=1)


@pytest.mark.parametrize("kind", BOUND)
@pytest.mark.parametrize("name", ATTENTION)
@torch.no_grad()
def test_every_attention_within_the_bound(name: str, kind: KVCacheKind) -> None:
    model, tokens = lively(name), tokens_of()
    full = model(tokens)
    for chunk, hadamard in ((5, False), (5, True), (N_TOKENS, False)):
        error = (decoded(model, tokens, kind, chunk, hadamard) - full).std() / full.std()
        assert 0 < error < BOUND[kind], (chunk, hadamard)


@pytest.mark.parametrize("name", ["standard", "decoupled", "latent"])
@torch.no_grad()
def test_chunks_of_a_tile_see_what_single_tokens_see(name: str) -> None:
    # In float64, or a last bit that a processor rounds the other way may turn a code, which shows.
    model, tokens = lively(name).double(), tokens_of()
    tiles = decoded(model, tokens, KVCacheKind.Q4_0, TILE)
    torch.testing.assert_close(tiles, decoded(model, tokens, KVCacheKind.Q4_0, 1), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(tiles, model(tokens), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_failed_forward_leaves_a_quantised_context_usable() -> None:
    model, tokens = lively("decoupled"), tokens_of()
    ctx = model.new_context(2, N_TOKENS, KVCacheKind.MIXED, tail_tokens=TILE)
    first = model(tokens[:, :30], ctx)
    rest = ctx.clone()
    ctx.caches[0].append({n: torch.ones(2, 2, 1, w) for n, _, w in model.attention_layers()[0][1].dims.streams})
    torch.testing.assert_close(model(tokens[:, 30:], ctx), model(tokens[:, 30:], rest))
    assert ctx.position == rest.position == N_TOKENS
    assert first.isfinite().all()
