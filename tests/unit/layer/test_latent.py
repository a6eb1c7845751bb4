"""The latent layout: both forms against the definition in float64, the choice between them, and what is cached."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from caramba.cache import Context, LatentLayerKVCache, new_layer_cache
from caramba.config.cost import Width
from caramba.config.layer import AttentionLayerConfig
from caramba.layer import AttentionLayer, LatentProjection
from caramba.layer.latent import expanding_is_cheaper

D_MODEL, T = 16, 9
LATENT: dict[str, Any] = {
    "mode": "decoupled",
    "layout": "latent",
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 6,
}
SHAPES = {"wide": {"sem_dim": 10, "geo_dim": 4}, "narrow": {"sem_dim": 3, "geo_dim": 8}}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gates": {"decoupled_gate": True, "decoupled_gate_dynamic": True, "learned_temperature": True},
    "window": {"local_window": 3, "bias": True},
    "null": {"null_attn": True, "local_window": 4, "bias": "qkv"},
    "chunks": {"null_attn": True, "q_chunk": 2, "rope_enabled": False},
}


def build(shape: str = "wide", **fields: Any) -> AttentionLayer:
    """A float64 layer of which no parameter is zero."""
    torch.manual_seed(0)
    layer = AttentionLayer(
        AttentionLayerConfig.model_validate({"d_model": D_MODEL, **LATENT, **SHAPES[shape], **fields})
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return layer.double()


def features(n: int = T) -> Tensor:
    return torch.randn(2, n, D_MODEL, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def turned(x: Tensor, inv_freq: Tensor | None) -> Tensor:
    """Rotate [B, T, D] at positions 0, 1, … as complex numbers, by angles and factors in float32 as in the layer."""
    if inv_freq is None:
        return x
    angles = torch.arange(x.shape[1], dtype=torch.float32)[:, None] * inv_freq
    first, second = x.chunk(2, -1)
    out = torch.complex(first, second) * torch.complex(angles.cos(), angles.sin())
    return torch.cat((out.real, out.imag), -1)


def naive(layer: AttentionLayer, x: Tensor) -> Tensor:
    """The definition, one head at a time, from the layer's tensors."""
    w = {name.removeprefix("projection."): value for name, value in layer.state_dict().items()}
    config, width = layer.config, layer.config.query_dim
    inv_freq = w["rope.inv_freq"][0] if config.rope_enabled else None
    zero = x.new_zeros(())
    q = (x @ w["q.weight"].T + w.get("q.bias", zero)).unflatten(-1, (-1, width))
    c = x @ w["c.weight"].T + w["c.bias"]
    k_geo = turned(x @ w["k_geo.weight"].T + w.get("k_geo.bias", zero), inv_freq)
    distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    hidden = (distance < 0) | (distance >= (config.local_window or x.shape[1]))
    if config.null_attn:
        c = torch.cat((w["null_c"].expand(len(x), 1, -1), c), 1)
        k_geo = torch.cat((w["null_geo"].expand(len(x), 1, -1), k_geo), 1)
        hidden = torch.nn.functional.pad(hidden, (1, 0))
    out = []
    for h in range(config.n_heads):
        sem = q[:, :, h] @ w["q_sem_map"][h] @ c.mT
        geo = turned(q[:, :, h] @ w["q_geo_map"][h], inv_freq) @ k_geo.mT
        if config.decoupled_gate:
            logit = w["gate"][h] + (x @ w["gate_dynamic.weight"][h])[..., None]
            sem, geo = 2 * logit.sigmoid() * sem, (2 - 2 * logit.sigmoid()) * geo
        score = (sem + geo) / width**0.5
        if config.learned_temperature:
            score = score * w["temperature"][h].exp()
        out.append(score.masked_fill(hidden, -torch.inf).softmax(-1) @ c @ w["v_up"][h])
    return torch.cat(out, -1) @ w["out.weight"].T + w["out.bias"]


def both_forms(layer: AttentionLayer, x: Tensor) -> list[Tensor]:
    projection = layer.projection
    assert isinstance(projection, LatentProjection)
    q, streams = projection(x)
    attend = (projection.attend_expanded, projection.attend_absorbed)
    heads = [form(q, streams, layer.score) for form in attend]
    return [layer.out(x.transpose(1, 2).flatten(2)) for x in heads]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_both_forms_and_every_chunking_equal_the_definition(shape: str, option: str) -> None:
    layer, x = build(shape, **OPTIONS[option]), features()
    if layer.projection.rope is not None:
        layer.projection.rope.inv_freq.uniform_(0.1, 1.0)
    expected = naive(layer, x)
    for out in (layer(x), *both_forms(layer, x)):
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    for sizes in ([1] * T, [4, 5], [7, 1, 1], [T]):
        assert_decode_equals(layer, x, sizes, expected)


class Float64Cache(LatentLayerKVCache):
    """A cache that keeps what it is given, so that a decode is exact."""

    def append(self, streams: Any) -> dict[str, Tensor]:
        self.kept = {
            name: torch.cat((getattr(self, "kept", {}).get(name, x[:, :, :0]), x), 2) for name, x in streams.items()
        }
        super().append(streams)
        return self.kept


def assert_decode_equals(layer: AttentionLayer, x: Tensor, sizes: list[int], expected: Tensor) -> None:
    ctx, outs = Context([Float64Cache(layer.dims.streams, batch_size=2, max_tokens=T)]), []
    with torch.no_grad():
        for part in x.split(sizes, dim=1):
            ctx.begin()
            outs.append(layer(part, ctx))
            ctx.commit(part.shape[1])
    torch.testing.assert_close(torch.cat(outs, 1), expected, rtol=0, atol=1e-10)


def test_gradients_of_both_forms_are_equal() -> None:
    layer, x = build(null_attn=True, decoupled_gate=True, learned_temperature=True), features()
    names, parameters = zip(*layer.named_parameters(), strict=True)
    expanded, absorbed = (
        torch.autograd.grad(out.square().sum(), parameters, retain_graph=True) for out in both_forms(layer, x)
    )
    for name, ours, theirs in zip(names, expanded, absorbed, strict=True):
        assert (ours != 0).any(), name
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, msg=name)


def test_tensors_are_those_of_the_schema() -> None:
    layer = build(bias=True, null_attn=True, **OPTIONS["gates"])
    assert {n.removeprefix("projection."): tuple(p.shape) for n, p in layer.named_parameters()} == (
        layer.config.parameter_shapes()
    )
    assert layer.state_dict()["projection.rope.inv_freq"].shape == (1, 2)
    assert isinstance(new_layer_cache(layer.dims, 1, 8), LatentLayerKVCache)


@pytest.mark.parametrize(("latent", "head_dim"), [(10, 6), (128, 64), (24, 32), (6, 6)])
def test_the_form_is_the_one_of_fewer_flops(latent: int, head_dim: int) -> None:
    for n_queries in (2, 3, 17, 200):
        for past in (0, 1, 5, 300, 5000):
            n_keys = n_queries + past
            pairs = sum(past + t + 1 for t in range(n_queries))
            expanded = 2 * n_keys * latent * head_dim + pairs * 2 * head_dim
            absorbed = 2 * n_queries * latent * head_dim + pairs * 2 * latent
            assert expanding_is_cheaper(n_queries, n_keys, latent, head_dim) == (expanded < absorbed)
    assert not expanding_is_cheaper(1, 5000, latent, head_dim)


def test_the_choice_breaks_no_graph() -> None:
    layer = build()
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    for n in (9, 1):
        torch.testing.assert_close(compiled(features(n)), layer(features(n)))


def test_fresh_maps_keep_the_scale_of_plain_heads() -> None:
    torch.manual_seed(0)
    fields = {"d_model": 256, "n_heads": 8, "head_dim": 32}
    latent = AttentionLayer(
        AttentionLayerConfig.model_validate(
            {**fields, "mode": "decoupled", "layout": "latent", "sem_dim": 96, "geo_dim": 32}
        )
    )
    projection, x = latent.projection, torch.randn(4, 64, 256)
    assert isinstance(projection, LatentProjection)
    for linear in (projection.q, projection.c, projection.k_geo):
        torch.nn.init.normal_(linear.weight, std=256**-0.5)
        if linear.bias is not None:
            torch.nn.init.zeros_(linear.bias)
    q, streams = projection(x)
    k, v = projection.keys_values(streams)
    scores = q @ k.mT
    assert 0.8 < scores.std() < 1.25
    assert 0.8 < v.std() < 1.25


@pytest.mark.parametrize("option", ["plain", "gates"])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_autograd_keeps_is_what_the_plan_says(shape: str, option: str) -> None:
    layer = AttentionLayer(
        AttentionLayerConfig.model_validate(
            {
                "d_model": D_MODEL,
                **LATENT,
                **SHAPES[shape],
                **OPTIONS[option],
                "decoupled_gate_dynamic": False,
            }
        )
    )
    # Copies of weights and the rotary table are shared by the batch.
    batch, n_tokens, kept = 64, 32, []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        layer(torch.randn(batch, n_tokens, D_MODEL, requires_grad=True))
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() // 4 for x in kept}
    measured = sum(size for at, size in sizes.items() if at not in own) / (batch * n_tokens)
    assert measured == pytest.approx(layer.config.infer(Width(D_MODEL)).activation_elements, rel=0.02)
