"""Caches: growth and bytes from real tensors, truncation, formats, and the context's cursor and position."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from caramba.cache import (
    Context,
    DecoupledLayerKVCache,
    KVCacheKind,
    KVCacheTensor,
    KVCacheTensorConfig,
    LatentLayerKVCache,
    LayerKVCache,
    new_layer_cache,
)
from caramba.config.layer import AttentionLayerConfig, AttentionMode
from caramba.errors import CarambaError, ConfigError

STANDARD = AttentionLayerConfig(d_model=16, n_heads=2).dims()
DECOUPLED = AttentionLayerConfig(
    d_model=16, n_heads=4, n_kv_heads=2, mode=AttentionMode.DECOUPLED, sem_dim=4, geo_dim=8, v_dim=6
).dims()


def tensor(max_tokens: int = 100, kind: KVCacheKind = KVCacheKind.FP32, static: bool = False) -> KVCacheTensor:
    return KVCacheTensor(
        KVCacheTensorConfig(kind), batch_size=2, n_heads=3, width=5, max_tokens=max_tokens, static=static
    )


def test_growing_allocates_geometrically_and_never_beyond_the_limit() -> None:
    cache, row = tensor(), 2 * 3 * 5 * 4
    assert cache.allocated_bytes == 0
    capacities = []
    for _ in range(100):
        cache.append(torch.ones(2, 3, 1, 5))
        assert cache.allocated_bytes == cache.capacity * row
        assert cache.used_bytes == cache.n_tokens * row
        capacities.append(cache.capacity)
    assert sorted(set(capacities)) == [16, 32, 64, 100]


def test_growing_keeps_what_was_stored() -> None:
    cache = tensor()
    values = torch.randn(2, 3, 70, 5)
    for part in values.split([1, 15, 1, 40, 13], dim=2):
        cache.append(part)
    assert torch.equal(cache.read(), values)


def test_a_full_cache_takes_more_once_it_is_extended() -> None:
    cache, values = tensor(max_tokens=20, static=True), torch.randn(2, 3, 30, 5)
    cache.append(values[:, :, :20])
    with pytest.raises(ConfigError, match="21 tokens do not fit max_tokens=20"):
        cache.append(values[:, :, 20:21])
    cache.extend(10)  # never less than before
    cache.extend(30)
    cache.append(values[:, :, 20:])
    assert torch.equal(cache.read(), values)
    assert cache.capacity == 30


def test_static_allocates_everything_at_once() -> None:
    cache = tensor(static=True)
    assert cache.allocated_bytes == 100 * 2 * 3 * 5 * 4
    before = cache.read().untyped_storage().data_ptr()
    cache.append(torch.ones(2, 3, 100, 5))
    assert cache.read().untyped_storage().data_ptr() == before
    assert cache.used_bytes == cache.allocated_bytes


@pytest.mark.parametrize(("kind", "size"), [(KVCacheKind.FP32, 4), (KVCacheKind.FP16, 2), (KVCacheKind.BF16, 2)])
def test_kinds_store_their_size_and_round(kind: KVCacheKind, size: int) -> None:
    cache = tensor(kind=kind)
    values = torch.randn(2, 3, 7, 5)
    cache.append(values)
    assert cache.bytes_per_token == 3 * 5 * size
    assert torch.equal(cache.read().float(), values.to(cache.read().dtype).float())


def test_auto_is_nobodys_choice_yet() -> None:
    with pytest.raises(
        CarambaError,
        match=r"kind=auto is a policy that has not been resolved to a format; use one of: fp32, .*q8_0, q4_0",
    ):
        new_layer_cache(STANDARD, 1, 8, KVCacheKind.AUTO)


def test_truncate_then_append_overwrites() -> None:
    cache = tensor()
    first, second = torch.randn(2, 3, 6, 5), torch.randn(2, 3, 4, 5)
    cache.append(first)
    cache.truncate(2)
    cache.append(second)
    assert torch.equal(cache.read(), torch.cat((first[:, :, :2], second), dim=2))
    with pytest.raises(ConfigError, match=r"truncate to 7 tokens, expected 0 to 6"):
        cache.truncate(7)


def test_append_refuses_what_does_not_fit() -> None:
    cache = tensor(max_tokens=4)
    with pytest.raises(ConfigError, match=r"5 tokens do not fit max_tokens=4"):
        cache.append(torch.ones(2, 3, 5, 5))
    with pytest.raises(ConfigError, match=r"got shape \(1, 3, 1, 5\), expected \[2, 3, T, 5\]"):
        cache.append(torch.ones(1, 3, 1, 5))
    with pytest.raises(ConfigError, match=r"cannot store a tensor that autograd follows"):
        cache.append(torch.ones(2, 3, 1, 5, requires_grad=True))
    assert cache.n_tokens == 0


def test_a_cache_grown_in_inference_mode_is_writable_outside() -> None:
    cache = tensor()
    with torch.inference_mode():
        cache.append(torch.ones(2, 3, 3, 5))
    cache.append(torch.zeros(2, 3, 1, 5))
    assert cache.read()[0, 0, :, 0].tolist() == [1, 1, 1, 0]


def test_class_follows_from_the_streams() -> None:
    assert isinstance(new_layer_cache(STANDARD, 1, 8), LayerKVCache)
    cache = new_layer_cache(DECOUPLED, 3, 8, KVCacheKind.BF16, static=True)
    assert isinstance(cache, DecoupledLayerKVCache)
    assert cache.bytes_per_token == DECOUPLED.cached * 2 == 36
    assert cache.allocated_bytes == 3 * 8 * 36
    with pytest.raises(ConfigError, match=r"got streams \('k', 'v'\), expected \('k_sem', 'k_geo', 'v'\)"):
        DecoupledLayerKVCache(STANDARD.streams, batch_size=1, max_tokens=1)
    latent = AttentionLayerConfig(
        d_model=16, n_heads=2, mode=AttentionMode.DECOUPLED, layout="latent", sem_dim=4, geo_dim=4
    ).dims()
    cache = new_layer_cache(latent, 3, 8, KVCacheKind.BF16, static=True)
    assert isinstance(cache, LatentLayerKVCache)
    assert cache.bytes_per_token == (4 + 4) * 2
    with pytest.raises(ConfigError, match=r"no cache holds the streams \('k',\); use the dims of an attention"):
        new_layer_cache(replace(latent, streams=(("k", 1, 4),)), 1, 8)


def test_layer_cache_refuses_foreign_streams() -> None:
    with pytest.raises(ConfigError, match=r"got streams \['k', 'v'\], expected \['k_geo', 'k_sem', 'v'\]"):
        new_layer_cache(DECOUPLED, 1, 8).append({"k": torch.ones(1, 2, 1, 8), "v": torch.ones(1, 2, 1, 8)})


def step(n: int) -> dict[str, torch.Tensor]:
    return {"k": torch.ones(1, 2, n, 8), "v": torch.ones(1, 2, n, 8)}


def test_context_advances_cursor_and_position() -> None:
    ctx = Context([new_layer_cache(STANDARD, 1, 8) for _ in range(2)])
    for n, position in ((3, 3), (1, 4)):
        ctx.begin()
        for expected in ctx.caches:
            cache = ctx.next_cache()
            assert cache is expected
            cache.append(step(n))
        with pytest.raises(ConfigError, match=r"attention application 3 has no cache"):
            ctx.next_cache()
        ctx.commit(n)
        assert ctx.position == position
    assert ctx.bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert ctx.used_bytes() == 4 * ctx.bytes_per_token
    assert ctx.nbytes() == 8 * ctx.bytes_per_token
    ctx.truncate(1)
    assert ctx.position == 1
    assert {cache.n_tokens for cache in ctx.caches} == {1}
    with pytest.raises(ConfigError, match=r"truncate to 2 tokens, expected 0 to 1"):
        ctx.truncate(2)


def test_context_survives_a_failed_forward_and_notices_a_skipped_cache() -> None:
    ctx = Context([new_layer_cache(STANDARD, 1, 8) for _ in range(2)])
    ctx.begin()
    ctx.next_cache().append(step(2))
    with pytest.raises(ConfigError, match=r"1 of 2 caches were used"):
        ctx.commit(2)
    assert ctx.position == 0
    ctx.begin()
    assert [cache.n_tokens for cache in ctx.caches] == [0, 0]
