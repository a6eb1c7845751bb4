"""What every pass keeps to: changed modules stay as they are, new hooks are refused, the plain model comes back."""

from __future__ import annotations

import pytest
import torch
from tests.unit.lower.test_norm_linear import lively
from torch import nn

from caramba.config.layer import SwiGLULayerConfig
from caramba.errors import ConfigError
from caramba.layer import SwiGLULayer
from caramba.lower import fuse_training, prefix_attention
from caramba.lower.float8 import Float8Linear, Float8Recipe
from caramba.lower.lowering import PASSES, Pass, has_hooks, lower
from caramba.ops import backend

KERNELS: dict[str, tuple[str, ...]] = {
    "float8_swiglu": ("float8_cast", "float8_swiglu", "float8_swiglu_backward"),
    "latent_queries": ("latent_queries",),
    "first_tokens": ("first_tokens",),
    "prefix_attention": ("prefix_attention",),
    "split_keys": ("decoupled_attention",),
    "absorb_latent": ("absorbed_queries",),
    "norm_linear": ("small_batch_linear",),
    "small_batch_head": ("small_batch_linear",),
}


@pytest.fixture(params=PASSES, ids=lambda one: one.name)
def one(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Pass:
    """Each pass, on a device that has its kernels."""
    for op in KERNELS.get(request.param.name, ()):
        monkeypatch.setitem(backend._attached, (op, "cpu"), "triton")
    monkeypatch.setattr(fuse_training, "FUSED_DEVICES", frozenset({"cpu"}))
    return request.param


def model_of(one: Pass) -> nn.Module:
    """A module that the pass replaces something of."""
    if one.name == "float8_swiglu":
        recipe = Float8Recipe("rowwise", "cpu")
        layer = SwiGLULayer(SwiGLULayerConfig(d_model=32, d_ff=48))
        for name in ("gate", "up", "down"):
            part = layer.get_submodule(name)
            assert isinstance(part, nn.Linear)
            layer.set_submodule(name, Float8Linear(part, recipe))
        return nn.Sequential(layer)
    if one.name in ("first_tokens", "prefix_attention"):
        return lively("latent_first")
    return lively(
        "latent" if one.name in ("latent_keys", "latent_queries", "split_keys", "absorb_latent") else "gqa_scaled"
    )


def kinds(model: nn.Module) -> list[type[nn.Module]]:
    return [type(module) for module in model.modules()]


def run(one: Pass, model: nn.Module) -> int:
    """Lower in the first mode of a pass and return how many modules the pass replaced."""
    return lower(model, "cpu", one.modes[0], is_compiled=one.name == "fuse_training").replaced[one.name]


def test_plain_class_is_back_after_restore(one: Pass) -> None:
    model = model_of(one)
    before, names = kinds(model), list(model.state_dict())
    lowered = lower(model, "cpu", one.modes[0], is_compiled=one.name == "fuse_training")
    assert lowered.replaced[one.name] > 0
    assert kinds(model) != before
    assert list(model.state_dict()) == names
    lowered.restore()
    assert kinds(model) == before


def test_hooked_modules_are_not_matched(one: Pass) -> None:
    model = model_of(one)
    for module in model.modules():
        module.register_forward_pre_hook(lambda *_: None)
    before = kinds(model)
    assert run(one, model) == 0
    assert all(has_hooks(module) for module in model.modules())
    assert kinds(model) == before


def test_an_instance_forward_is_not_matched(one: Pass) -> None:
    model = model_of(one)
    for module in model.modules():
        module.forward = module.forward
    assert run(one, model) == 0


def test_new_hooks_are_refused(one: Pass) -> None:
    model = model_of(one)
    lowered = lower(model, "cpu", one.modes[0], is_compiled=one.name == "fuse_training")
    refused = [replaced.module for replaced in lowered._replaced if any(True for _ in replaced.module.children())]
    assert refused or one.name == "small_batch_head"
    for module in refused:
        for part in module.children():
            with pytest.raises(ConfigError, match="lower: got a forward hook"):
                part.register_forward_hook(lambda *_: None)
    lowered.restore()
    model.register_forward_hook(lambda *_: None)


def test_prefix_attention_gives_the_plain_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backend._attached, ("prefix_attention", "cpu"), "reference")
    monkeypatch.setattr(prefix_attention, "has_fused_widths", lambda *_: True)
    monkeypatch.setattr(prefix_attention, "supports_two_widths", lambda *_: True)
    model = lively("latent_first")
    tokens = torch.randint(model.spec.embedder.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))
    want = model(tokens)
    seen: list[torch.Size] = []
    op = prefix_attention.prefix_attention
    monkeypatch.setattr(prefix_attention, "prefix_attention", lambda *x: (seen.append(x[0].shape), op(*x))[1])
    with lower(model, "cpu", "train"):
        torch.testing.assert_close(model(tokens), want, rtol=1e-4, atol=1e-4)
    assert seen
