"""Weights side by side: the same numbers by one product, the same parameters, nothing left behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from caramba.config.layer import AttentionLayerConfig, AttentionMode, SwiGLULayerConfig
from caramba.layer import LatentProjection, StandardProjection, SwiGLULayer
from caramba.lower import fuse_linears
from caramba.lower.fuse_linears import FusedGateUp, FusedLatent, uses_fused_linears
from caramba.lower.lowering import lower
from caramba.ops import backend
from caramba.ops.backend import without_kernels


def swiglu(bias: bool = False) -> SwiGLULayer:
    torch.manual_seed(0)
    return SwiGLULayer(SwiGLULayerConfig(d_model=8, d_ff=24, bias=bias)).double()


@pytest.mark.parametrize("bias", [False, True])
def test_one_product_gives_what_the_layers_give(bias: bool) -> None:
    layer, x = swiglu(bias), torch.randn(2, 3, 8, dtype=torch.float64)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    expected = layer(x)
    with torch.no_grad(), lower(layer, "cpu", "decode"):
        assert isinstance(layer, FusedGateUp)
        assert layer.fused_linear.takes(x)
        torch.testing.assert_close(layer(x), expected, rtol=1e-13, atol=1e-13)
    assert type(layer) is SwiGLULayer
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_prompts_read_the_joined_product_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = AttentionLayerConfig(d_model=8, n_heads=4, n_kv_heads=2, bias=True, mode=AttentionMode.GQA)
    heads, gated, x = StandardProjection(config).double(), swiglu(), torch.randn(2, 9, 8, dtype=torch.float64)
    (q, streams), y = heads(x, 3), gated(x)
    # As on a GPU, whose eager forwards take fused products only where a kernel reads them whole.
    monkeypatch.setattr(fuse_linears, "uses_fused_linears", lambda device, is_compiled: False)
    for op in ("rope_qkv", "swiglu_packed", "small_batch_linear"):
        monkeypatch.setitem(backend._attached, (op, "cpu"), "reference")
    with torch.no_grad(), lower(heads, "cpu", "decode"), lower(gated, "cpu", "decode"):
        monkeypatch.setattr(StandardProjection, "linears", None)
        monkeypatch.setattr(SwiGLULayer, "linears", None)
        for found, wanted in ((heads(x, 3), (q, streams)), (gated(x), y)):
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)  # float32 angles
        assert isinstance(gated, FusedGateUp)
        assert gated.fused_linear.prefill(x[:, :8]) is None
        with torch.enable_grad():
            assert gated.fused_linear.prefill(x) is None


def test_the_parameters_are_parts_of_the_joined_ones_and_move_once() -> None:
    layer = swiglu(bias=True)
    gate, bias = layer.gate.weight, layer.gate.bias
    with lower(layer, "cpu", "decode"):
        assert isinstance(layer, FusedGateUp)
        assert layer.fused_linear.bias is not None
        places = [layer.fused_linear.weight.data_ptr(), layer.fused_linear.bias.data_ptr()]
        assert layer.gate.weight is gate
        assert layer.gate.bias is bias
        assert places == [gate.data_ptr(), bias.data_ptr()]
    with torch.no_grad():
        gate.mul_(2)
        layer.up.bias.add_(1)
    # What a graph captured in one block reads is what the next block computes with.
    with lower(layer, "cpu", "decode"):
        assert isinstance(layer, FusedGateUp)
        assert layer.fused_linear.bias is not None
        assert [layer.fused_linear.weight.data_ptr(), layer.fused_linear.bias.data_ptr()] == places
        assert torch.equal(layer.fused_linear.weight[:24], gate)
        assert torch.equal(layer.fused_linear.bias, torch.cat((bias, layer.up.bias)))
    x = torch.randn(2, 8, dtype=torch.float64)
    layer(x).sum().backward()  # and they can still be trained
    assert gate.grad is not None
    assert bias.grad is not None


def test_a_latent_layer_joins_layers_with_and_without_a_bias() -> None:
    fields = {
        "mode": "decoupled",
        "layout": "latent",
        "n_heads": 4,
        "head_dim": 6,
        "sem_dim": 10,
        "geo_dim": 4,
    }
    torch.manual_seed(0)
    layer = LatentProjection(AttentionLayerConfig.model_validate({"d_model": 16, **fields})).double()
    assert [one.bias is None for one in (layer.q, layer.c, layer.k_geo)] == [True, False, True]
    x, rows = torch.randn(2, 3, 16, dtype=torch.float64), torch.tensor([[0], [2]])
    places = []
    for scale in (1.0, 3.0):  # and again after training has changed what lies side by side
        with torch.no_grad():
            layer.c.bias.mul_(scale)
            wanted, streams = layer(x)
            asked = layer(x, rows=rows)[0]
        with torch.no_grad(), lower(layer, "cpu", "decode"):
            assert isinstance(layer, FusedLatent)
            assert layer.fused_linear.bias is not None
            places.append((layer.fused_linear.weight.data_ptr(), layer.fused_linear.bias.data_ptr()))
            assert torch.equal(layer.fused_linear.bias[24:34], layer.c.bias)
            assert not layer.fused_linear.bias[:24].any()
            assert not layer.fused_linear.bias[34:].any()
            q, found = layer(x)
            torch.testing.assert_close(q, wanted, rtol=1e-13, atol=1e-13)
            torch.testing.assert_close(found, streams, rtol=1e-13, atol=1e-13)
            assert torch.equal(layer(x, rows=rows)[0], asked)  # of some tokens alone: not by the one product
    assert places[0] == places[1]


def test_layers_that_are_not_plain_or_unlike_stay_apart() -> None:
    hooked, changed, unlike, mixed = swiglu(), swiglu(), swiglu(), swiglu(bias=True)
    hooked.up.register_forward_hook(lambda *_: None)
    changed.up = nn.Sequential(changed.up)  # type: ignore[assignment]
    unlike.up.float()
    mixed.up.bias = nn.Parameter(mixed.up.bias.detach().float())
    for layer in (hooked, changed, unlike, mixed):
        with lower(layer, "cpu", "decode"):
            assert not isinstance(layer, FusedGateUp)


def test_training_and_gradients_never_take_the_joined_product() -> None:
    layer, x = swiglu(), torch.randn(2, 8, dtype=torch.float64)
    with lower(layer, "cpu", "decode"):
        assert isinstance(layer, FusedGateUp)
        assert not layer.fused_linear.takes(x)
        layer(x).sum().backward()
    assert layer.gate.weight.grad is not None
    assert layer.up.weight.grad is not None


def test_cuda_weights_move_for_compiled_forwards_alone() -> None:
    assert [uses_fused_linears(torch.device("cuda"), is_compiled=compiled) for compiled in (False, True)] == [
        False,
        True,
    ]
    assert uses_fused_linears(torch.device("cpu"), is_compiled=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weights_of_eager_cuda_forwards_stay_where_they_are_without_a_kernel_for_few_rows() -> None:
    layer = swiglu(bias=True).cuda()
    places = [weight.data_ptr() for weight in layer.parameters()]
    with without_kernels("small_batch_linear"), lower(layer, "cpu", "decode"):
        assert not isinstance(layer, FusedGateUp)
    assert [weight.data_ptr() for weight in layer.parameters()] == places
    with lower(layer, "cpu", "decode", is_compiled=True):
        assert isinstance(layer, FusedGateUp)
