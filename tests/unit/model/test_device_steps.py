"""Steps whose lengths the device counts equal those of the host, compile whole, and touch a cache in place."""

from __future__ import annotations

import copy

import pytest
import torch
from model_specs import ATTENTION, DECOUPLED, VOCAB, block, spec, transformer
from torch import Tensor

from caramba.cache import Context, DeviceContext, KVCacheKind
from caramba.errors import CacheFull, ConfigError
from caramba.model import Model, build_model

N_TOKENS, PROMPT = 14, 6
EXTRA = {
    "null": {"n_heads": 4, "n_kv_heads": 2, "mode": "gqa", "null_attn": True, "local_window": 4},
    "decoupled_null": {**DECOUPLED, "null_attn": True, "rope_semantic": True},
}
STEPPED = [name for name in ATTENTION if "exact_first_tokens" not in ATTENTION[name]] + list(EXTRA)
EXACT = [KVCacheKind.FP32, KVCacheKind.FP16, KVCacheKind.BF16]


@pytest.fixture(autouse=True)
def more_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, config in EXTRA.items():
        monkeypatch.setitem(ATTENTION, name, config)


def lively(name: str, positions: int | None = None) -> Model:
    made = spec(block(name), block(name), max_positions=positions) if positions else transformer(name)
    model = build_model(made, seed=0).eval().double()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
    return model


def tokens_of() -> Tensor:
    return torch.randint(VOCAB, (2, N_TOKENS), generator=torch.Generator().manual_seed(1))


def prefilled(model: Model, kind: KVCacheKind, *, static: bool = True, max_tokens: int = N_TOKENS) -> Context:
    ctx = model.new_context(2, max_tokens, kind, static=static)
    model(tokens_of()[:, :PROMPT], ctx)
    return ctx


def stepped(model: Model, step: DeviceContext, start: int = PROMPT) -> Tensor:
    outputs = []
    for t in range(start, N_TOKENS):
        step.advance()
        outputs.append(model(tokens_of()[:, t : t + 1], step))
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("name", STEPPED)
@torch.no_grad()
def test_device_steps_equal_the_growing_cache(name: str) -> None:
    model = lively(name, positions=N_TOKENS if name == "standard" else None)
    for kind in EXACT if name in ("gqa_scaled", "decoupled", "latent") else EXACT[2:]:
        growing = prefilled(model, kind, static=False)
        wanted = torch.cat([model(part, growing) for part in tokens_of()[:, PROMPT:].split(1, 1)], dim=1)
        ctx = prefilled(model, kind)
        step = DeviceContext(ctx)
        torch.testing.assert_close(stepped(model, step), wanted, rtol=1e-9, atol=1e-9)
        assert ctx.position == N_TOKENS
        assert step.device_lengths.tolist() == [N_TOKENS] * 2
        for key, values in ctx.state_dict().items():
            torch.testing.assert_close(values, growing.state_dict()[key], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("decoupled", KVCacheKind.MIXED),
        ("latent", KVCacheKind.NF4),
        ("bottleneck", KVCacheKind.NF4),
        ("gqa_scaled", KVCacheKind.Q8_0),
        ("null", KVCacheKind.Q4_0),
        ("window", KVCacheKind.MIXED),
    ],
)
@torch.no_grad()
def test_device_steps_pack_the_tail_of_a_quantised_cache_when_the_host_would(name: str, kind: KVCacheKind) -> None:
    model = lively(name)

    def prompted() -> Context:
        ctx = model.new_context(2, N_TOKENS, kind, static=True, tail_tokens=3)
        model(tokens_of()[:, :PROMPT], ctx)
        return ctx

    host, step = prompted(), DeviceContext(prompted())
    packed = step.packed
    assert packed is not None
    for t in range(PROMPT, N_TOKENS):
        wanted = model(tokens_of()[:, t : t + 1], host)
        step.advance()
        found = model(tokens_of()[:, t : t + 1], step)
        assert packed.tolist() == [host.n_packed] * 2  # in the same tensor, as a captured step needs
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert (host.n_packed or 0) > 6
    for key, values in step.ctx.state_dict().items():
        torch.testing.assert_close(values, host.state_dict()[key], rtol=0, atol=0)
    step.truncate(PROMPT + 1)
    assert packed.tolist() == [step.ctx.n_packed] * 2 == [PROMPT + 1] * 2
    step.advance()
    assert model(tokens_of()[:, PROMPT + 1 : PROMPT + 2], step).isfinite().all()


@pytest.mark.parametrize(("name", "n_apart"), [("gqa_scaled", 0), ("decoupled", 2), ("latent", 2)])
@torch.no_grad()
def test_steps_look_for_angles_of_layers_once_and_swapped_layers_make_their_own(
    name: str, n_apart: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, walks = lively(name), []
    step = DeviceContext(prefilled(model, KVCacheKind.FP32))
    layers = model.attention_layers()
    monkeypatch.setattr(Model, "attention_layers", lambda _: walks.append(1) or layers)
    wanted = stepped(model, step)
    assert (len(walks), len(step.separate_ropes or ())) == (1, n_apart)
    for path, layer in layers:
        model.set_submodule(path, copy.deepcopy(layer))
        rope = layer.projection.rope
        assert rope is not None
        rope.inv_freq.fill_(torch.nan)  # what has left the model is no longer read
    step.truncate(PROMPT)
    torch.testing.assert_close(stepped(model, step), wanted, rtol=0, atol=0)


@torch.no_grad()
def test_overflow_rollback_and_return_to_the_host() -> None:
    model = lively("latent")
    ctx = prefilled(model, KVCacheKind.FP32)
    step = DeviceContext(ctx)
    wanted = stepped(model, step)
    with pytest.raises(CacheFull, match=r"15 tokens do not fit max_tokens=14"):
        step.advance()
    assert ctx.position == N_TOKENS
    before = ctx.state_dict()
    model(tokens_of()[:, :1], step)  # what no host counted is written nowhere
    assert all(torch.equal(values, before[key]) for key, values in ctx.state_dict().items())
    step.truncate(10)
    torch.testing.assert_close(stepped(model, step, 10), wanted[:, 10 - PROMPT :])
    ctx.truncate(11)
    torch.testing.assert_close(model(tokens_of()[:, 11:], ctx), wanted[:, 11 - PROMPT :])
    with pytest.raises(ConfigError, match="decode step on the device: got 2 tokens per sequence, expected 1"):
        model.hidden(tokens_of()[:, :2], DeviceContext(prefilled(model, KVCacheKind.FP32)))


def test_what_needs_the_host_is_refused_by_name() -> None:
    def refused(name: str, match: str, kind: KVCacheKind = KVCacheKind.FP32, static: bool = True) -> None:
        with pytest.raises(ConfigError, match=rf"decode step on the device: .*{match}.*; decode with the context"):
            DeviceContext(build_model(transformer(name), seed=0).new_context(1, 8, kind, static=static))

    refused("latent_first", "keeps its first tokens")
    refused("standard", "static=True", static=False)
    scaling = {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8}
    layer = block("standard")
    layer["layers"][0]["layers"][1] |= {"rope_scaling": scaling}
    model = build_model(spec(layer), seed=0).eval()
    with torch.no_grad():
        model(tokens_of()[:, :1], DeviceContext(model.new_context(2, 8, static=True)))
        with pytest.raises(ConfigError, match=r"type=dynamic beyond 8 tokens .* the cache holds 9"):
            model(tokens_of()[:, :1], DeviceContext(model.new_context(2, 9, static=True)))
