"""Products of a latent layer's training step: the same numbers and gradients as by its layers, and who keeps them."""

from __future__ import annotations

import pytest
import torch
from tests.unit.layer.test_latent import OPTIONS, build, features
from torch import Tensor, nn

from caramba.distill.lora import LoraLinear
from caramba.layer import AttentionLayer, LatentProjection
from caramba.lower import absorb_latent
from caramba.lower.absorb_latent import FusedLatentKeys
from caramba.lower.lowering import lower


def gradients(layer: AttentionLayer, x: Tensor) -> list[Tensor]:
    out = layer(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]


@pytest.mark.parametrize("option", ["plain", "null"])
def test_training_takes_latent_and_geometric_keys_from_one_product(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = build(**OPTIONS[option]), features().requires_grad_()
    apart = gradients(layer, x)
    shapes: list[torch.Size] = []
    linear = absorb_latent.F.linear
    with lower(layer, "cpu", "train") as lowered:
        assert lowered.replaced["latent_keys"] == 1
        monkeypatch.setattr(absorb_latent.F, "linear", lambda *x: (shapes.append(x[1].shape), linear(*x))[1])
        for got, want in zip(gradients(layer, x), apart, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        assert torch.Size([14, 16]) in shapes
        shapes.clear()
        with torch.no_grad():
            assert torch.equal(layer(x), apart[0])
        assert torch.Size([14, 16]) not in shapes, "decoding runs the layers as they are"


def hooked(projection: LatentProjection) -> None:
    projection.c.register_forward_hook(lambda *_: None)


def adapted(projection: LatentProjection) -> None:
    projection.c = LoraLinear(projection.c, rank=2, alpha=2.0, dropout=0.0)  # type: ignore[assignment]


def watched(projection: LatentProjection) -> None:
    projection.register_forward_pre_hook(lambda *_: None)


def overridden(projection: LatentProjection) -> None:
    projection.k_geo.forward = projection.k_geo.forward


@pytest.mark.parametrize("change", [hooked, adapted, watched, overridden])
def test_changed_layers_are_called(change: object) -> None:
    layer = build()
    assert isinstance(layer.projection, LatentProjection)
    change(layer.projection)  # type: ignore[operator]
    kinds = [type(module) for module in layer.modules()]
    with lower(layer, "cpu", "train") as lowered:
        assert lowered.replaced["latent_keys"] == 0
        assert [type(module) for module in layer.modules()] == kinds
        assert isinstance(layer.projection.q, nn.Linear)


def test_keys_of_one_product_are_the_joined_keys() -> None:
    layer = build()
    with lower(layer, "cpu", "train"):
        projection = layer.projection
        assert isinstance(projection, FusedLatentKeys)
        for dtype in (torch.float64, torch.bfloat16):
            _, streams = projection.to(dtype)(features().to(dtype))
            want, _ = projection.keys_values(streams)
            c, k_geo = (streams[name].squeeze(1) for name in ("c", "k_geo"))
            joined = projection.keys_by_one_product(c, k_geo).unflatten(-1, (want.shape[1], -1)).transpose(1, 2)
            assert torch.equal(joined[..., 6:], streams["k_geo"].expand_as(joined[..., 6:]))
            torch.testing.assert_close(joined, want, rtol=1e-12 if dtype == torch.float64 else 0.02, atol=0.02)
