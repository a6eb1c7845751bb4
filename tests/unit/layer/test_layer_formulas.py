"""The small layers against their formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from caramba.config.layer import (
    DropoutLayerConfig,
    LayerNormLayerConfig,
    LinearLayerConfig,
    RMSNormLayerConfig,
    SwiGLULayerConfig,
)
from caramba.config.layer_base import LayerConfig
from caramba.layer import DropoutLayer, LayerNormLayer, LinearLayer, RMSNormLayer, SwiGLULayer
from caramba.model.topology import build_node

X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("affine", [True, False])
def test_rms_norm(affine: bool) -> None:
    layer = RMSNormLayer(RMSNormLayerConfig(d_model=8, eps=1e-3, elementwise_affine=affine))
    weight = 1.0
    if layer.weight is not None:
        torch.nn.init.normal_(layer.weight)
        weight = layer.weight.double()
    expected = X.double() / (X.double().pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    torch.testing.assert_close(layer(X).double(), expected, rtol=1e-5, atol=1e-6)
    assert layer(X.bfloat16()).dtype == torch.bfloat16
    assert (layer.weight is None) != affine


def test_layer_norm() -> None:
    layer = LayerNormLayer(LayerNormLayerConfig(d_model=8, eps=1e-3))
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    centred = X - X.mean(-1, keepdim=True)
    expected = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * layer.weight + layer.bias
    torch.testing.assert_close(layer(X), expected)
    assert LayerNormLayer(LayerNormLayerConfig(d_model=8, bias=False)).bias is None


def test_swiglu() -> None:
    layer = SwiGLULayer(SwiGLULayerConfig(d_model=8, d_ff=5, bias=True))
    gate = X @ layer.gate.weight.T + layer.gate.bias
    expected = (gate * torch.sigmoid(gate) * (X @ layer.up.weight.T + layer.up.bias)) @ layer.down.weight.T
    torch.testing.assert_close(layer(X), expected + layer.down.bias)


@pytest.mark.parametrize(("reduce", "d_in"), [("mean", 8), ("sum", 8), ("concat", 24)])
def test_linear_reduces_the_stack(reduce: str, d_in: int) -> None:
    stack = torch.randn(2, 5, 3, 8)
    layer = LinearLayer(LinearLayerConfig(d_in=d_in, d_out=4, reduce=reduce, bias=True))  # pyright: ignore
    reduced = {"mean": stack.mean(2), "sum": stack.sum(2), "concat": torch.cat(list(stack.unbind(2)), -1)}[reduce]
    torch.testing.assert_close(layer(stack), F.linear(reduced, layer.weight, layer.bias))


def test_linear_without_reduce_keeps_every_leading_dimension() -> None:
    layer = LinearLayer(LinearLayerConfig(d_in=8, d_out=4))
    torch.testing.assert_close(layer(X), X @ layer.weight.T)


def test_dropout_is_off_in_eval() -> None:
    layer = DropoutLayer(DropoutLayerConfig(p=0.5))
    out = layer(torch.ones(1000))
    assert set(out.tolist()) == {0.0, 2.0}
    assert torch.equal(layer.eval()(X), X)


@pytest.mark.parametrize(
    "config",
    [
        RMSNormLayerConfig(d_model=8),
        RMSNormLayerConfig(d_model=8, elementwise_affine=False),
        LayerNormLayerConfig(d_model=8),
        LayerNormLayerConfig(d_model=8, bias=False),
        SwiGLULayerConfig(d_model=8, d_ff=5),
        SwiGLULayerConfig(d_model=8, d_ff=5, bias=True),
        LinearLayerConfig(d_in=8, d_out=4, bias=True),
        DropoutLayerConfig(p=0.1),
    ],
)
def test_parameters_are_those_of_the_schema(config: LayerConfig) -> None:
    module = build_node(config)
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == config.parameter_shapes()
