"""Quantised caches: what they store, how many bytes of it, and what survives rollback, reordering and saving."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from tests.examples import examples
from torch import Tensor

from caramba.cache import Context, KVCacheKind, KVCacheTensor, KVCacheTensorConfig, new_layer_cache
from caramba.config.kvcache import bytes_of_streams
from caramba.config.layer import AttentionDims, AttentionLayerConfig, AttentionMode
from caramba.errors import CacheFull, ConfigError
from caramba.ops.formats import dequantize, hadamard, quantize

KINDS = (KVCacheKind.Q8_0, KVCacheKind.Q4_0, KVCacheKind.NF4)
TILE = 4
LLAMA = {"d_model": 2048, "n_heads": 32, "n_kv_heads": 8}


def decoupled(layout: str, sem: int, geo: int, v: int | None = None) -> AttentionDims:
    return AttentionLayerConfig(
        **LLAMA, mode=AttentionMode.DECOUPLED, layout=layout, sem_dim=sem, geo_dim=geo, v_dim=v
    ).dims()


def tensor(kind: KVCacheKind, max_tokens: int = 60, static: bool = False, rotate: bool = False) -> KVCacheTensor:
    config = KVCacheTensorConfig(kind, tail_tokens=TILE, hadamard=rotate)
    return KVCacheTensor(config, batch_size=2, n_heads=3, width=20, max_tokens=max_tokens, static=static)


def values(n: int, seed: int = 0) -> Tensor:
    return torch.randn(2, 3, n, 20, generator=torch.Generator().manual_seed(seed))


def rounded(x: Tensor, kind: KVCacheKind, rotate: bool = False) -> Tensor:
    """What tokens become: bfloat16, then blocks over all heads' features of each token."""
    x = x.bfloat16()
    rows = (hadamard(x) if rotate else x).transpose(1, 2).flatten(2)
    back = dequantize(*quantize(rows, kind), kind, rows.shape[-1])
    heads = back.unflatten(2, (3, 20)).transpose(1, 2)
    return hadamard(heads) if rotate else heads


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [[], [1, 2, 3, 5, 20], [30], list(range(1, 41))])
def test_old_tokens_are_blocks_and_recent_ones_16_bit(kind: KVCacheKind, rotate: bool, cuts: list[int]) -> None:
    cache, x = tensor(kind, rotate=rotate), values(41)
    for part in torch.tensor_split(x, cuts, dim=2):
        cache.append(part)
    packed = cache.store.used(41)["codes"]
    assert packed % TILE == 0
    assert 0 <= 41 - packed <= 2 * TILE
    out = cache.read()
    assert out.dtype == torch.float32
    assert torch.equal(out[:, :, packed:], x[:, :, packed:].bfloat16().float())
    torch.testing.assert_close(out[:, :, :packed], rounded(x, kind, rotate)[:, :, :packed], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_tokens", [33, 60, 64, 1001])
def test_rows_of_scales_begin_where_kernels_load_16_bytes(kind: KVCacheKind, max_tokens: int) -> None:
    cache = tensor(kind, max_tokens, static=True)
    codes, scales = cache.store.buffers["codes"], cache.store.buffers["scales"]
    assert max_tokens <= codes.capacity == scales.capacity < max_tokens + 16
    assert all(stride * scales.data.element_size() % 16 == 0 for stride in scales.data.stride()[:2])
    cache.append(values(max_tokens))
    with pytest.raises(CacheFull):  # what is allocated beyond it is nobody's
        cache.append(values(1))


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(
    steps=st.lists(st.tuples(st.integers(0, 14), st.integers(0, 14)), min_size=1, max_size=8),
    static=st.booleans(),
)
def test_any_appends_and_rollbacks_hold_the_right_tokens(steps: list[tuple[int, int]], static: bool) -> None:
    cache, kept = tensor(KVCacheKind.Q8_0, max_tokens=200, static=static), values(0)
    for seed, (add, drop) in enumerate(steps):
        new = values(add, seed)
        cache.append(new)
        kept = torch.cat((kept, new), dim=2)
        used = cache.store.used(cache.n_tokens)
        assert used["codes"] + used["tail"] == cache.n_tokens
        assert used["tail"] <= 2 * TILE
        end = max(0, kept.shape[2] - drop)
        kept = kept[:, :, :end]
        cache.truncate(end)
        # bfloat16 and half a step of q8_0 at a peak below 5
        assert cache.read().shape == kept.shape
        assert end == 0 or (cache.read() - kept).abs().max() < 2**-8 * 5 + 0.5 * 5 / 127


@pytest.mark.parametrize("kind", KINDS)
def test_taking_back_the_last_append_restores_exactly(kind: KVCacheKind) -> None:
    for before in range(30):
        cache = tensor(kind)
        for token in values(before).split(1, dim=2) if before else ():
            cache.append(token)
        cache.append(values(1, seed=9))
        cache.truncate(before)
        expected = cache.read()
        cache.append(values(TILE, seed=1))
        cache.truncate(before)
        assert torch.equal(cache.read(), expected)


def test_rollback_into_the_blocks_leaves_them_quantised() -> None:
    cache, x = tensor(KVCacheKind.Q4_0), values(40)
    cache.append(x)
    cache.truncate(21)
    assert cache.store.used(21) == {"codes": 21, "scales": 21, "tail": 0}
    cache.append(values(3, seed=1))
    assert torch.equal(cache.read()[:, :, :21], rounded(x, KVCacheKind.Q4_0)[:, :, :21])
    assert torch.equal(cache.read()[:, :, 21:], values(3, seed=1).bfloat16().float())


@pytest.mark.parametrize(
    ("dims", "exact", "mixed"),
    [
        (decoupled("per_head", 128, 256, 512), 1792, 632),
        (decoupled("latent", 128, 256), 768, 344),
        (decoupled("latent", 128, 64), 384, 140),
        (decoupled("latent", 128, 32), 320, 106),
        (AttentionLayerConfig(**LLAMA, mode=AttentionMode.GQA).dims(), 2048, 576),
    ],
)
def test_marginal_bytes_counted_from_storage_are_the_table(dims: AttentionDims, exact: int, mixed: int) -> None:
    """The table of the surgery's budgets: 16 bits, and 4-bit latents, values and semantic keys with 8-bit geometry."""
    for kind, expected in ((KVCacheKind.FP16, exact), (KVCacheKind.MIXED, mixed)):
        caches = [new_layer_cache(dims, 2, length, kind, static=True) for length in (256, 256 + 640)]
        grown = (caches[1].allocated_bytes - caches[0].allocated_bytes) / (2 * 640)
        assert grown == caches[0].bytes_per_token == bytes_of_streams(dims.streams, kind) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_padding_tail_and_slack_are_counted(kind: KVCacheKind) -> None:
    cache = tensor(kind, static=True)
    cache.append(values(41))
    row = {"q8_0": 2 * 34, "q4_0": 2 * 18, "nf4": 36}[kind]  # 60 elements: two blocks of 32, or one of 64
    assert cache.bytes_per_token == row
    assert cache.tail_bytes == 2 * 1 * 60 * 2  # one token of 60 elements in 2 bytes, twice
    assert cache.used_bytes == 2 * 40 * row + cache.tail_bytes
    assert cache.allocated_bytes == 2 * (64 * row + 2 * TILE * 60 * 2)  # rows of scales in multiples of 16 tokens
    growing = tensor(kind)
    assert growing.allocated_bytes == 0
    growing.append(values(41))
    assert growing.used_bytes == cache.used_bytes <= growing.allocated_bytes < cache.allocated_bytes


def test_a_short_cache_stays_in_16_bits() -> None:
    cache, x = tensor(KVCacheKind.Q4_0, max_tokens=2 * TILE), values(2 * TILE)
    for part in x.split([3, 4, 1], dim=2):
        cache.append(part)
    assert torch.equal(cache.read(), x.bfloat16().float())
    assert cache.tail_bytes == cache.used_bytes


@pytest.mark.parametrize("kind", [*KINDS, KVCacheKind.MIXED, KVCacheKind.FP16])
def test_select_clone_and_state_carry_everything(kind: KVCacheKind) -> None:
    dims = decoupled("latent", 12, 4)
    cache = new_layer_cache(dims, 3, 40, kind, tail_tokens=TILE)
    streams = {name: torch.randn(3, heads, 21, width) for name, heads, width in dims.streams}
    before = {name: tensor.clone() for name, tensor in cache.append(streams).items()}

    def held(of: Context) -> dict[str, Tensor]:
        return of.caches[0].read()

    ctx = Context([cache])
    ctx.position = 21
    with torch.inference_mode():
        other = ctx.clone()
        other.select(torch.tensor([2, 0, 2, 1]))
    for name, stored in held(other).items():
        assert torch.equal(stored.to(before[name].dtype), before[name][[2, 0, 2, 1]])
    other.caches[0].append(
        {name: x[:1].expand(4, -1, 5, -1) for name, x in ((n, s[:, :, :5]) for n, s in streams.items())}
    )
    other.truncate(2)
    saved = load(save({key: tensor.contiguous() for key, tensor in ctx.state_dict().items()}))
    fresh = Context([new_layer_cache(dims, 3, 40, kind, tail_tokens=TILE)])
    fresh.load_state_dict(saved)
    assert fresh.position == 21
    assert fresh.used_bytes() == ctx.used_bytes()
    for name, stored in held(fresh).items():
        assert torch.equal(stored, held(ctx)[name])
        assert torch.equal(stored.to(before[name].dtype), before[name])  # the copy's changes stayed with the copy


def test_scores_do_not_change_when_queries_rotate_with_the_stored_keys() -> None:
    """What a kernel reads: rotated keys in the blocks, against queries that it rotates."""
    cache, x, q = tensor(KVCacheKind.Q4_0, rotate=True), values(40), values(1, seed=1)
    cache.append(x)
    store = cache.store
    codes, scales = store.codes.view(40).transpose(1, 2), store.scales.view(40).transpose(1, 2)[..., 0]
    rotated = dequantize(codes, scales, "q4_0", 60).unflatten(2, (3, 20)).transpose(1, 2)
    scores = (hadamard(q) * rotated).sum(-1)
    torch.testing.assert_close(scores, (q * cache.read()).sum(-1))


def test_rotation_helps_keys_with_an_outlier_channel() -> None:
    x = values(40)
    x[..., 5] += 30
    errors = {}
    for rotate in (False, True):
        cache = tensor(KVCacheKind.Q4_0, rotate=rotate)
        cache.append(x)
        errors[rotate] = (cache.read() - x).square().mean().item()
    assert errors[True] < 0.7 * errors[False]


def test_bad_input_is_named_and_changes_nothing() -> None:
    cache = tensor(KVCacheKind.Q4_0, max_tokens=20)
    cache.append(values(18))
    before = cache.read()
    with pytest.raises(CacheFull, match=r"21 tokens do not fit max_tokens=20"):
        cache.append(values(3))
    assert torch.equal(cache.read(), before)
    with pytest.raises(ConfigError, match=r"rows torch.float32 of shape \(2,\), expected integers"):
        cache.select(torch.ones(2))
    state = cache.state_dict()
    with pytest.raises(ConfigError, match=r"kind=fp16 holds \['values'\]"):
        tensor(KVCacheKind.FP16).load_state_dict(state)
    with pytest.raises(
        ConfigError, match=r"codes is torch.uint8 \[2, 2, 16, 16\], expected torch.int8 \[2, 2, 'T', 32\]"
    ):
        tensor(KVCacheKind.Q8_0).load_state_dict(state)
    small = tensor(KVCacheKind.Q4_0, max_tokens=15)
    with pytest.raises(CacheFull, match=r"18 tokens do not fit max_tokens=15"):
        small.load_state_dict(state)
    large = tensor(KVCacheKind.Q4_0)
    large.append(values(41))
    with pytest.raises(CacheFull, match=r"40 tokens of codes do not fit 16"):
        small.load_state_dict(large.state_dict())
    assert small.n_tokens == 0
    small.append(values(15))
    small.truncate(13)  # of which fewer are blocks than of the state that it refuses
    before = small.read()
    with pytest.raises(CacheFull, match=r"18 tokens do not fit max_tokens=15"):
        small.load_state_dict(state)
    assert torch.equal(small.read(), before)
    with pytest.raises(ConfigError, match=r"got tail_tokens=0, expected 1 or more"):
        KVCacheTensor(KVCacheTensorConfig(KVCacheKind.NF4, 0), batch_size=1, n_heads=1, width=4, max_tokens=4)
    ctx = Context([new_layer_cache(decoupled("latent", 12, 4), 1, 8)])
    with pytest.raises(ConfigError, match=r"the state has '1.c.values', expected caches 0 to 0"):
        ctx.load_state_dict({"1.c.values": values(1)})
