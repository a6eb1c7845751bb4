"""Linear layers of one input as one product: the same numbers and gradients, and when they stay apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.model.model_specs import VOCAB, transformer
from torch import Tensor, nn

from caramba.config.layer import AttentionLayerConfig
from caramba.layer import StandardProjection
from caramba.layer.rope import RotaryEmbedding, share_rope_tables
from caramba.lower import fuse_linears
from caramba.lower import fuse_training as module
from caramba.lower.fuse_training import TrainingQkv, are_joinable, products
from caramba.lower.join_repeats import join_repeats
from caramba.lower.lowering import lower
from caramba.model import build_model
from caramba.model.topology import clear_checkpointing, compilable_regions
from caramba.ops import backend as ops_backend

WIDTHS = (8, 3, 5)


@pytest.fixture
def compiled_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the path of a compiled step on a GPU, uncompiled and here."""
    monkeypatch.setattr(module, "FUSED_DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(module, "MIN_ROWS", 6)


def layers_of(bias: bool) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(4, width, bias=bias).double() for width in WIDTHS]


def in_one(outputs: tuple[Tensor, ...]) -> bool:
    return len({y.untyped_storage().data_ptr() for y in outputs}) == 1


def step(layers: list[nn.Linear], x: Tensor) -> tuple[list[Tensor], bool]:
    """Outputs and all gradients, and whether one product made the outputs."""
    x = x.clone().requires_grad_()
    outputs = products(x, layers) or tuple(layer(x) for layer in layers)
    torch.stack([(index + 1) * y.square().sum() for index, y in enumerate(outputs)]).sum().backward()
    grads = [parameter.grad for layer in layers for parameter in layer.parameters()]
    found = [value for value in (*outputs, x.grad, *grads) if value is not None]
    return found, in_one(outputs)


@pytest.mark.parametrize("bias", [False, True])
def test_one_product_gives_what_each_layer_gives(
    bias: bool, compiled_on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    joined, is_one = step(layers_of(bias), x)
    monkeypatch.setattr(module, "MIN_ROWS", 7)
    apart, is_still_one = step(layers_of(bias), x)
    assert (is_one, is_still_one) == (True, False)
    assert len(joined) == len(apart) == 3 + 1 + 3 * (1 + bias)
    for found, wanted in zip(joined, apart, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def frozen(layers: list[nn.Linear]) -> None:
    layers[1].weight.requires_grad_(False)


def hooked(layers: list[nn.Linear]) -> None:
    layers[2].register_forward_hook(lambda *_: None)


def replaced(layers: list[nn.Linear]) -> None:
    layers[0] = type("OtherLinear", (nn.Linear,), {})(4, 8, bias=False).double()


@pytest.mark.parametrize("change", [frozen, hooked, replaced])
def test_what_is_changed_stays_apart(change: Callable[[list[nn.Linear]], None], compiled_on_cpu: None) -> None:
    layers = layers_of(False)
    change(layers)
    x = torch.randn(6, 4, dtype=torch.float64)
    assert not (are_joinable(layers) and products(x, layers))


@pytest.mark.parametrize(
    "changes",
    [{"qk_norm": True}, {"rope_enabled": False}, {"learned_temperature": True}],
)
def test_other_projections_turn_their_heads_by_themselves(
    changes: dict[str, Any], compiled_on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ops_backend._attached, ("rope_qkv", "cpu"), "triton")
    monkeypatch.setattr(fuse_linears, "rope_qkv", None)
    projection = StandardProjection(AttentionLayerConfig.model_validate({"d_model": 8, "n_heads": 2, **changes}))
    x = torch.randn(2, 4, 8)
    want, _ = projection(x)
    with lower(projection, "cpu", "train", is_compiled=True):
        assert isinstance(projection, TrainingQkv)
        q, _ = projection(x)
    torch.testing.assert_close(q, want, rtol=1e-6, atol=1e-6)


def test_eager_steps_and_other_devices_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    projection = StandardProjection(AttentionLayerConfig(d_model=8, n_heads=2))
    with lower(projection, "cpu", "train", is_compiled=True):
        assert type(projection) is StandardProjection
    monkeypatch.setattr(module, "FUSED_DEVICES", frozenset({"cpu"}))
    with lower(projection, "cpu", "train"):
        assert type(projection) is StandardProjection


def test_layers_share_one_table_of_angles_that_changes_no_bit() -> None:
    model = build_model(transformer("gqa_scaled"), seed=0)
    rotaries = [item for item in model.modules() if isinstance(item, RotaryEmbedding)]
    tokens = torch.randint(VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        bare = model(tokens)
        assert all(rotary.table is None for rotary in rotaries)
    longer = torch.cat((tokens, tokens), 1)
    first = model(longer)
    assert len({id(rotary.table) for rotary in rotaries}) == 1
    assert torch.equal(model(tokens), bare)
    assert torch.equal(model(longer), first)
    first.sum().backward()
    explicit = RotaryEmbedding(8, 1e4, n_groups=2, explicit=True)  # surgery may write other frequencies
    share_rope_tables(explicit, 5, torch.device("cpu"))
    assert explicit.table is None


def test_a_repeat_is_one_region_until_it_is_taken_apart_again() -> None:
    model = build_model(transformer("standard"), seed=0)
    tokens = torch.randint(VOCAB, (2, 5), generator=torch.Generator().manual_seed(0))
    before, names, regions = model(tokens), set(model.state_dict()), compilable_regions(model.topology)
    join_repeats(model.topology)
    assert len(compilable_regions(model.topology)) < len(regions)
    assert set(model.state_dict()) == names
    assert torch.equal(model(tokens), before)
    clear_checkpointing(model.topology)
    assert compilable_regions(model.topology) == regions
    next(iter(model.attention_layers()))[1].register_forward_hook(lambda *_: None)
    join_repeats(model.topology)
    assert compilable_regions(model.topology) == regions
