"""Attention: each mode against a naive float64 computation from the layer's own weights, and every option's effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from caramba.config.layer import AttentionLayerConfig
from caramba.layer import AttentionLayer, CausalScore, DecoupledProjection, StandardProjection

D = 16
MODES: dict[str, dict[str, Any]] = {
    "standard": {"n_heads": 4},
    "standard_head_dim": {"n_heads": 4, "head_dim": 6},
    "gqa": {"n_heads": 4, "n_kv_heads": 2, "mode": "gqa"},
    "bottleneck": {"n_heads": 4, "mode": "bottleneck", "attn_dim": 8},
    "decoupled": {"n_heads": 4, "mode": "decoupled", "sem_dim": 8, "geo_dim": 16, "v_dim": 12},
    "decoupled_gqa": {
        "n_heads": 4,
        "n_kv_heads": 2,
        "mode": "decoupled",
        "sem_dim": 6,
        "geo_dim": 8,
        "v_dim": 10,
    },
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"bias": True, "qk_norm": True, "learned_temperature": True, "local_window": 3},
    "no_rope": {"rope_enabled": False},
    "null": {"null_attn": True, "local_window": 3},
    "chunks": {"null_attn": True, "q_chunk": 2, "learned_temperature": True},
}
GATES: dict[str, Any] = {"decoupled_gate": True, "decoupled_gate_dynamic": True}


def build(**fields: Any) -> AttentionLayer:
    """Build with every parameter random, neutral ones included, so that a formula cannot hide behind a zero."""
    torch.manual_seed(0)
    layer = AttentionLayer(AttentionLayerConfig(d_model=D, **fields))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def heads_of(x: Tensor, n: int) -> Tensor:
    return x.view(x.shape[0], x.shape[1], n, -1).transpose(1, 2)


def normed(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x: Tensor, inv_freq: Tensor | None) -> Tensor:
    """Complex rotation; inv_freq [groups, D/2], groups repeated over the heads."""
    if inv_freq is None:
        return x
    first, second = x.chunk(2, -1)
    angles = torch.arange(x.shape[2]).double()[None, :, None] * inv_freq[:, None, :]
    angles = angles.repeat_interleave(x.shape[1] // inv_freq.shape[0], 0)
    out = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((out.real, out.imag), -1)


def naive(layer: AttentionLayer, x: Tensor) -> Tensor:
    """The definition, from the state dict, in float64: loops over nothing, masks explicitly, repeats heads."""
    w = {name.removeprefix("projection."): value.double() for name, value in layer.state_dict().items()}
    config, x = layer.config, x.double()
    heads, kv_heads = config.n_heads, config.n_kv_heads or config.n_heads
    inv_freq = layer.projection.rope.inv_freq.double() if layer.projection.rope is not None else None

    def project(name: str, n: int, norm: str | None = None) -> Tensor:
        y = x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.tensor(0.0))
        return normed(heads_of(y, n), w.get(f"{norm or name}_norm.weight"))

    if config.mode == "decoupled":
        sem_freq = layer.projection.rope_sem.inv_freq.double() if config.rope_semantic else None
        q_sem, q_geo = turned(project("q_sem", heads), sem_freq), turned(project("q_geo", heads), inv_freq)
        k_sem = turned(project("q_sem" if config.tie_qk else "k_sem", kv_heads, "k_sem"), sem_freq)
        k_geo = turned(project("k_geo", kv_heads), inv_freq)
        if config.decoupled_gate:
            logits = w["gate"][None, :, None, None]
            if config.decoupled_gate_dynamic:
                logits = logits + (x @ w["gate_dynamic.weight"].T).transpose(1, 2)[..., None]
            q_sem, q_geo = q_sem * 2 * logits.sigmoid(), q_geo * (2 - 2 * logits.sigmoid())
        per = heads // kv_heads
        q, k = torch.cat((q_sem, q_geo), -1), torch.cat((k_sem, k_geo), -1)
    else:
        q, k = turned(project("q", heads), inv_freq), turned(project("k", kv_heads), inv_freq)
        per = heads // kv_heads
    score = q @ k.repeat_interleave(per, 1).mT / q.shape[-1] ** 0.5
    if config.null_attn:
        null = w["null_k"].view(kv_heads, -1, 1).repeat_interleave(per, 0)
        score = torch.cat((q @ null / q.shape[-1] ** 0.5, score), -1)
    if config.learned_temperature:
        score = score * w["temperature"].exp()[:, None, None]
    distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    hidden = (distance < 0) | (distance >= (config.local_window or x.shape[1]))
    v = project("v", kv_heads).repeat_interleave(per, 1)
    if config.null_attn:
        hidden = torch.nn.functional.pad(hidden, (1, 0))
        null = w["null_v"].view(kv_heads, 1, -1).repeat_interleave(per, 0)
        v = torch.cat((null.expand(x.shape[0], -1, -1, -1), v), 2)
    o = (score.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)
    return o @ w["out.weight"].T + w.get("out.bias", torch.tensor(0.0))


def fields_of(mode: str, option: str) -> dict[str, Any]:
    gates = GATES if mode.startswith("decoupled") and option == "all" else {}
    return {**MODES[mode], **OPTIONS[option], **gates}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("mode", MODES)
def test_equals_the_definition(mode: str, option: str) -> None:
    layer = build(**fields_of(mode, option))
    x = torch.randn(2, 7, D)
    torch.testing.assert_close(layer(x).double(), naive(layer, x), rtol=1e-4, atol=1e-5)
    assert {n.removeprefix("projection."): tuple(p.shape) for n, p in layer.named_parameters()} == (
        layer.config.parameter_shapes()
    )


def test_tied_semantic_keys_equal_the_definition() -> None:
    layer = build(n_heads=4, mode="decoupled", sem_dim=8, geo_dim=8, tie_qk=True, qk_norm=True, bias=True)
    x = torch.randn(2, 7, D)
    torch.testing.assert_close(layer(x).double(), naive(layer, x), rtol=1e-4, atol=1e-5)
    assert "projection.k_sem.weight" not in layer.state_dict()
    assert {n.removeprefix("projection."): tuple(p.shape) for n, p in layer.named_parameters()} == (
        layer.config.parameter_shapes()
    )


def test_gates_and_temperature_start_neutral() -> None:
    plain = AttentionLayer(AttentionLayerConfig(d_model=D, **MODES["decoupled_gqa"]))
    gated = AttentionLayer(AttentionLayerConfig(d_model=D, **MODES["decoupled_gqa"], **GATES, learned_temperature=True))
    gated.projection.reset_parameters()
    missing = gated.load_state_dict(plain.state_dict(), strict=False)
    assert sorted(missing.missing_keys) == [
        "projection.gate",
        "projection.gate_dynamic.weight",
        "projection.temperature",
    ]
    x = torch.randn(2, 5, D)
    torch.testing.assert_close(gated(x), plain(x))


def test_only_the_geometric_path_knows_positions() -> None:
    layer = build(**MODES["decoupled_gqa"])
    x = torch.randn(1, 4, D)
    (q0, s0), (q9, s9) = layer.projection(x, 0), layer.projection(x, 9)
    assert isinstance(layer.projection, DecoupledProjection)
    torch.testing.assert_close(s0["k_sem"], s9["k_sem"])
    torch.testing.assert_close(q0[..., :3], q9[..., :3])
    assert not torch.allclose(s0["k_geo"], s9["k_geo"])
    assert not torch.allclose(q0[..., 3:], q9[..., 3:])
    torch.testing.assert_close(
        layer.score(q0, *layer.projection.keys_values(s0)),
        layer.score(q9, *layer.projection.keys_values(s9)),
        rtol=1e-4,
        atol=1e-5,
    )


def test_streams_are_those_of_the_dims() -> None:
    for fields in MODES.values():
        layer = build(**fields)
        q, streams = layer.projection(torch.randn(2, 5, D), 0)
        assert q.shape == (2, layer.dims.n_heads, 5, layer.dims.qk)
        assert tuple(streams) == tuple(name for name, _, _ in layer.dims.streams)
        for name, heads, width in layer.dims.streams:
            assert streams[name].shape == (2, heads, 5, width)
    assert isinstance(build(**MODES["gqa"]).projection, StandardProjection)


def test_frequencies_per_kv_head_are_weights_of_decoupled_attention_only() -> None:
    assert "projection.rope.inv_freq" not in build(**MODES["gqa"]).state_dict()
    layer = build(**MODES["decoupled_gqa"])
    assert layer.state_dict()["projection.rope.inv_freq"].shape == (2, 2)
    assert layer.projection.rope is not None
    layer.projection.rope.inv_freq.copy_(torch.tensor([[1.0, 0.3], [0.7, 0.05]]))
    x = torch.randn(2, 7, D)
    torch.testing.assert_close(layer(x).double(), naive(layer, x), rtol=1e-4, atol=1e-5)


def test_dropout_is_off_in_eval() -> None:
    layer = build(n_heads=4, dropout=0.5)
    x = torch.randn(2, 7, D)
    assert not torch.equal(layer(x), layer(x))
    torch.testing.assert_close(layer.eval()(x).double(), naive(layer, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_autocast_and_bf16_stay_near(mode: str) -> None:
    layer = build(**fields_of(mode, "all"))
    x = torch.randn(2, 7, D)
    expected = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.1)
    cast = layer.to(torch.bfloat16)(x.bfloat16())
    assert cast.dtype == torch.bfloat16
    torch.testing.assert_close(cast.float(), expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("tied", [False, True])
def test_rope_semantic_equals_the_definition_and_forgets_where_it_stands(tied: bool) -> None:
    fields = {"n_heads": 4, "mode": "decoupled", "sem_dim": 16, "geo_dim": 8, "rope_semantic": True}
    layer = build(**fields, tie_qk=tied, qk_norm=True)
    x = torch.randn(2, 7, D)
    torch.testing.assert_close(layer(x).double(), naive(layer, x), rtol=1e-4, atol=1e-5)
    assert not any("rope_sem" in name for name in layer.state_dict())
    (_, s0), (_, s9) = layer.projection(x, 0), layer.projection(x, 9)
    assert not torch.allclose(s0["k_sem"], s9["k_sem"])
    plain = build(**{**fields, "rope_semantic": False}, tie_qk=tied, qk_norm=True)
    assert not torch.allclose(plain(x), layer(x))


@pytest.mark.parametrize("mode", MODES)
def test_null_attention_trains_and_starts_quiet(mode: str) -> None:
    layer = build(**MODES[mode], null_attn=True)
    layer.reset_parameters()
    assert layer.null_k is not None
    assert layer.null_v is not None
    first = layer.null_k.new_zeros(layer.null_k.shape)
    assert torch.equal(layer.null_k, first)
    x = torch.randn(2, 5, D)
    layer(x).square().sum().backward()
    for parameter in (layer.null_k, layer.null_v):
        assert parameter.grad is not None
        assert (parameter.grad != 0).all()
    with torch.no_grad():
        layer.null_k.fill_(0.0)
        layer.null_v.fill_(50.0)
    # A key of zero takes at least some weight from every query, the first one and those behind a window too.
    assert (layer(x) - build(**MODES[mode])(x)).abs().amax(-1).amin() > 0.1


@pytest.mark.parametrize("q_chunk", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("window", [None, 3])
def test_chunks_of_queries_give_the_same_numbers_and_gradients(q_chunk: int, window: int | None) -> None:
    fields = {**MODES["decoupled_gqa"], "local_window": window, "null_attn": True}
    whole, chunked = build(**fields), build(**fields, q_chunk=q_chunk)
    x = torch.randn(2, 7, D)
    torch.testing.assert_close(chunked(x), whole(x))
    for layer in (whole, chunked):
        layer(x).square().sum().backward()
    for a, b in zip(whole.parameters(), chunked.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


def test_chunks_bound_the_scores() -> None:
    seen: list[tuple[int, ...]] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            seen.extend(tuple(o.shape) for o in (out if isinstance(out, tuple) else (out,)) if hasattr(o, "shape"))
            return out

    q, k, v = (torch.randn(1, 2, 64, 8) for _ in range(3))
    with sdpa_kernel(SDPBackend.MATH), Sizes():
        CausalScore(q_chunk=8)(q, k, v)
    assert max(shape[-2] for shape in seen if len(shape) > 1 and shape[-1] == 64) == 8
    seen.clear()
    with sdpa_kernel(SDPBackend.MATH), Sizes():
        CausalScore()(q, k, v)
    assert max(shape[-2] for shape in seen if len(shape) > 1 and shape[-1] == 64) == 64
