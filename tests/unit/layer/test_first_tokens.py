"""First tokens at full precision: both forms, caches and documents against the definition; what half precision keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.layer.test_latent import OPTIONS as LATENT_OPTIONS
from tests.unit.layer.test_latent import SHAPES, both_forms, features, turned
from tests.unit.layer.test_latent import build as build_latent
from torch import Tensor

from caramba.cache import Context, FirstTokensKVCache, new_layer_cache
from caramba.config.cost import Width
from caramba.config.kvcache import KVCacheKind
from caramba.config.layer import AttentionLayerConfig
from caramba.errors import ConfigError
from caramba.layer import AttentionLayer, CausalScore, Documents
from caramba.layer.latent import attend_with_prefix

T = 9
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gates": LATENT_OPTIONS["gates"],
    "bias": {"bias": True, "q_chunk": 2},
    "no rope": {"rope_enabled": False, "bias": "qkv"},
}


def build(shape: str = "wide", n: int = 3, **fields: Any) -> AttentionLayer:
    return build_latent(shape, exact_first_tokens=n, **fields)


def definition(layer: AttentionLayer, x: Tensor, tensors: dict[str, Tensor] | None = None) -> Tensor:
    """One head at a time: keys and values of full width for the first tokens, of the latent for the others."""
    w = {name.removeprefix("projection."): value for name, value in (tensors or layer.state_dict()).items()}
    config, width, n = layer.config, layer.config.query_dim, layer.config.exact_first_tokens
    zero, rotates = x.new_zeros(()), config.rope_enabled
    geo, whole = (w[f"{name}rope.inv_freq"][0] if rotates else None for name in ("", "first."))
    q = (x @ w["q.weight"].T + w.get("q.bias", zero)).unflatten(-1, (-1, width))
    c = x @ w["c.weight"].T + w["c.bias"]
    k_geo = turned(x @ w["k_geo.weight"].T + w.get("k_geo.bias", zero), geo)
    k = (x @ w["first.k.weight"].T + w.get("first.k.bias", zero)).unflatten(-1, (-1, width))
    v = (x @ w["first.v.weight"].T + w["first.v.bias"]).unflatten(-1, (-1, width))
    mean = w["first.key_mean"].unflatten(0, (-1, width))
    is_first = torch.arange(x.shape[1]) < n
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    out = []
    for h in range(config.n_heads):
        group = h * k.shape[2] // config.n_heads
        sem, shift = q[:, :, h] @ w["q_sem_map"][h] @ c.mT, (q[:, :, h] @ mean[group])[..., None]
        geometric = turned(q[:, :, h] @ w["q_geo_map"][h], geo) @ k_geo.mT
        exact = turned(q[:, :, h], whole) @ turned(k[:, :, group], whole).mT
        if config.decoupled_gate:
            share = 2 * (w["gate"][h] + (x @ w["gate_dynamic.weight"][h])[..., None]).sigmoid()
            sem, shift, geometric = share * sem, share * shift, (2 - share) * geometric
        score = torch.where(is_first, exact - shift, sem + geometric) / width**0.5
        if config.learned_temperature:
            score = score * w["temperature"][h].exp()
        values = torch.where(is_first[:, None], v[:, :, group], c @ w["v_up"][h])
        out.append(score.masked_fill(hidden, -torch.inf).softmax(-1) @ values)
    return torch.cat(out, -1) @ w["out.weight"].T + w["out.bias"]


class Float64Cache(FirstTokensKVCache):
    """A cache that keeps what it is given, so that a decode is exact."""

    def append(self, streams: Any) -> dict[str, Tensor]:
        kept = getattr(self, "kept", {})
        self.kept = {name: torch.cat((kept.get(name, x[:, :, :0]), x), 2).clone() for name, x in streams.items()}
        super().append(streams)
        return self.kept


def decoded(layer: AttentionLayer, parts: Any, ctx: Context) -> Tensor:
    outs = []
    with torch.no_grad():
        for part in parts:
            ctx.begin()
            outs.append(layer(part, ctx))
            ctx.commit(part.shape[1])
    return torch.cat(outs, 1)


def test_heads_as_wide_as_those_of_large_models() -> None:
    layer = build("wide", head_dim=64, geo_dim=64, sem_dim=80)
    for out in both_forms(layer, features()):
        torch.testing.assert_close(out, definition(layer, features()), rtol=0, atol=1e-9)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_both_forms_and_every_chunking_equal_the_definition(shape: str, option: str) -> None:
    for n in (1, 3, T, T + 4):
        layer, x = build(shape, n, **OPTIONS[option]), features()
        expected = definition(layer, x)
        for out in (layer(x), *both_forms(layer, x)):
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-11)
        for sizes in ([1] * T, [2, 3, 4], [4, 5], [7, 1, 1]):
            ctx = Context([Float64Cache(layer.dims, batch_size=2, max_tokens=T)])
            torch.testing.assert_close(decoded(layer, x.split(sizes, dim=1), ctx), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("shape", SHAPES)
def test_each_document_has_first_tokens_of_its_own(shape: str) -> None:
    layer, x = build(shape, 3, bias=True, q_chunk=4), features(16)
    lengths = ([2, 9, 5], [16])
    ids = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    alone = [torch.cat([layer(part[None]) for part in x[b].split(row)], 1) for b, row in enumerate(lengths)]
    torch.testing.assert_close(layer(x, Documents.of(ids)), torch.cat(alone), rtol=0, atol=1e-11)


def test_a_cache_can_go_back_reorder_copy_and_be_stored() -> None:
    layer, x = build(n=4).float(), features(12).float()
    full = layer(x).detach()

    def fresh(kind: KVCacheKind = KVCacheKind.FP32) -> Context:
        return Context([new_layer_cache(layer.dims, 2, 12, kind)])

    def on(ctx: Context, since: int, rows: Tensor) -> None:
        out = decoded(layer, x[rows, since:].split(2, dim=1), ctx)
        torch.testing.assert_close(out, full[rows, since:], rtol=1e-4, atol=1e-4)

    both = torch.tensor([0, 1])
    ctx = fresh()
    decoded(layer, (x[:, :7],), ctx)
    for back in (7, 6, 2, 0):  # behind the first tokens, among them, before them
        ctx.truncate(back)
        on(ctx.clone(), back, both)
        restored = fresh()
        restored.load_state_dict(ctx.state_dict())
        on(restored, back, both)
        swapped = ctx.clone()
        swapped.select(torch.tensor([1, 0, 1]))
        on(swapped, back, torch.tensor([1, 0, 1]))
    on(ctx, 0, both)
    # A failed forward leaves the cache ahead; the next one goes back.
    ctx.truncate(3)
    ctx.begin()
    layer.projection.requires_grad_(False)
    layer(x[:, 3:5], ctx)
    on(ctx, 3, both)


@pytest.mark.parametrize(("kind", "size"), [("fp32", 4), ("bf16", 2), ("q4_0", 2), ("mixed", 2)])
def test_first_tokens_are_counted_apart(kind: str, size: int) -> None:
    layer, x = build(n=4).float(), features(12).float()
    plain = build_latent().dims
    cost = layer.config.infer(Width(16))
    cache, without = (new_layer_cache(dims, 2, 12, KVCacheKind(kind)) for dims in (layer.dims, plain))
    assert cache.bytes_per_token == without.bytes_per_token == cost.kv_bytes_per_token(KVCacheKind(kind))
    for n, kept in ((3, 3), (7, 4)):
        ctx = Context([cache])
        ctx.truncate(0)
        cache.truncate(0)
        decoded(layer, (x[:, :n],), ctx)
        assert cache.first_bytes == ctx.first_bytes() == 2 * kept * 2 * (6 + 6) * size
        assert cache.first_bytes == 2 * cost.first_bytes(KVCacheKind(kind), n)
    if kind in ("fp32", "bf16"):
        assert cache.used_bytes == 2 * cost.kv_bytes(KVCacheKind(kind), 7)
    assert without.first_bytes == 0
    static = new_layer_cache(layer.dims, 2, 12, KVCacheKind(kind), static=True)
    full = new_layer_cache(plain, 2, 12, KVCacheKind(kind), static=True)
    assert static.allocated_bytes - full.allocated_bytes == 2 * cost.first_bytes(KVCacheKind(kind))


def test_a_cache_refuses_what_is_not_its_own() -> None:
    layer = build(n=4).float()
    cache, plain = (new_layer_cache(dims, 2, 12) for dims in (layer.dims, build_latent().dims))
    _, streams = layer.projection(features(6).float())
    with pytest.raises(ConfigError, match=r"got streams .*k_first.*, expected .*'c', 'k_geo'"):
        plain.append(streams)
    with pytest.raises(ConfigError, match="without k_first, v_first"):
        cache.append({name: streams[name] for name in ("c", "k_geo")})
    with torch.no_grad():
        _, streams = layer.projection(features(6).float(), 2)
    with pytest.raises(ConfigError, match="got 2 tokens of k_first after 0 tokens, expected 4"):
        cache.append(streams)
    with torch.no_grad():
        _, streams = layer.projection(features(6).float())
    cache.append(streams)
    state = cache.state_dict() | {f"{name}.values": streams[name][:, :, :2] for name in ("k_first", "v_first")}
    with pytest.raises(ConfigError, match="the state has 2 tokens of k_first and 6 of the others, expected 4"):
        new_layer_cache(layer.dims, 2, 12).load_state_dict(state)


def test_gradients_are_those_of_the_definition() -> None:
    x = features()
    for shape in SHAPES:
        layer = build(shape, 3, **OPTIONS["gates"])
        names, parameters = zip(*layer.named_parameters(), strict=True)
        found = torch.autograd.grad(layer(x).square().sum(), parameters)
        tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
        expected = torch.autograd.grad(definition(layer, x, tensors).square().sum(), parameters)
        for name, ours, theirs in zip(names, found, expected, strict=True):
            assert (ours != 0).any(), name
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8, msg=name)


def test_half_precision_keeps_the_log_sum_exp() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (3 * torch.randn(1, 2, 64, 6, generator=generator).bfloat16() for _ in range(3))
    scores = (q.double() @ k.double().mT).masked_fill(torch.ones(64, 64).triu(1).bool(), -torch.inf)
    scores[..., :3] = -torch.inf
    # As large as the others' own, and between two bfloat16 numbers: alone they stand 1/4 apart there.
    total = scores.logsumexp(-1, keepdim=True).nan_to_num(neginf=20.0).clamp_min(20.0) + 0.11
    joined = torch.cat((total, scores), -1).softmax(-1)
    read, share = attend_with_prefix(CausalScore(), q, k, v, total.float(), 3)
    torch.testing.assert_close(share.double(), joined[..., :1], rtol=0.02, atol=2e-3)
    torch.testing.assert_close(read.double(), joined[..., 1:] @ v.double(), rtol=0.02, atol=0.05)


@pytest.mark.parametrize("option", [{}, {"decoupled_gate": True, "learned_temperature": True}])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_autograd_keeps_is_what_the_plan_says(shape: str, option: dict[str, Any]) -> None:
    layer = build(shape, 2, **option).float()
    assert isinstance(layer.config, AttentionLayerConfig)
    batch, n_tokens, kept = 64, 64, []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        layer(torch.randn(batch, n_tokens, 16, requires_grad=True))
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() // 4 for x in kept}
    measured = sum(size for at, size in sizes.items() if at not in own) / (batch * n_tokens)
    assert measured == pytest.approx(layer.config.infer(Width(16)).activation_elements, rel=0.02)
