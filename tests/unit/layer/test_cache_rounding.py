"""Attention that reads its keys and values as a quantised cache gives them back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from caramba.cache import Context, new_layer_cache
from caramba.config.kvcache import KVCacheKind
from caramba.config.layer import AttentionLayerConfig
from caramba.config.model import ModelSpec
from caramba.infer import Generator
from caramba.layer import AttentionLayer
from caramba.model import build_model
from caramba.ops.formats import dequantize, quantize, round_to_blocks

BLOCKS = {"q8_0": 32, "q4_0": 32, "nf4": 64}


def attention(seed: int = 0, **options: object) -> AttentionLayer:
    base = {"d_model": 64, "n_heads": 4, "n_kv_heads": 2, "mode": "decoupled", "layout": "latent"}
    widths = {"sem_dim": 40, "geo_dim": 16, "exact_first_tokens": 2}
    torch.manual_seed(seed)
    layer = AttentionLayer(AttentionLayerConfig.model_validate({**base, **widths, **options}))
    for module in layer.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    return layer


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_to_blocks_equals_the_stored_format(kind: str, dtype: torch.dtype) -> None:
    x = (torch.randn(3, 7, 100) * 10.0 ** torch.randint(-6, 4, (3, 7, 1))).to(dtype)
    x[0, 0] = 0
    stored = dequantize(*quantize(x, kind), kind, 100, dtype)
    assert torch.equal(round_to_blocks(x, kind, BLOCKS[kind]), stored)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "nf4", "mixed"])
def test_forward_reads_what_a_cache_of_the_format_stores(kind: str) -> None:
    layer = attention(cache_format=kind)
    x = torch.randn(2, 160, 64)
    with torch.no_grad():
        q, streams = layer.projection(x)
        read = {}
        for name, stream in streams.items():
            each = ("q8_0" if name == "k_geo" else "q4_0") if kind == "mixed" else kind
            rows = stream.transpose(1, 2).flatten(2)
            stored = dequantize(*quantize(rows, each), each, rows.shape[-1], rows.dtype)
            exact = name in ("k_first", "v_first")
            read[name] = stream if exact else stored.unflatten(-1, (stream.shape[1], -1)).transpose(1, 2)
        heads = layer.projection.attend(q, read, layer.score)
        expected = layer.out(heads.transpose(1, 2).flatten(2))
        plain = layer.out(layer.projection.attend(q, streams, layer.score).transpose(1, 2).flatten(2))
        assert torch.equal(layer(x), expected)
    assert not torch.allclose(expected, plain, atol=1e-5)


def test_gradient_of_the_rounding_is_the_identity() -> None:
    layer = attention(cache_format="q4_0")
    assert layer.cache_rounding is not None
    x = torch.randn(1, 1, 5, 40, requires_grad=True)
    grad = torch.randn(1, 1, 5, 40)
    rounded: Tensor = layer.cache_rounding({"c": x, "k_geo": torch.zeros(1, 1, 5, 16)})["c"]
    rounded.backward(grad)
    assert x.grad is not None
    assert torch.equal(x.grad, grad)


@pytest.mark.parametrize("chunks", [(160,), (100, 60), (90, 1, 1, 68)])
def test_prefill_in_pieces_equals_one_forward(chunks: tuple[int, ...]) -> None:
    layer = attention(cache_format="q8_0").eval()
    x = torch.randn(2, 160, 64)
    with torch.no_grad():
        whole = layer(x)
        cache = new_layer_cache(layer.dims, batch_size=2, max_tokens=160, kind=KVCacheKind.Q8_0)
        context = Context([cache])
        pieces = []
        for part in x.split(list(chunks), dim=1):
            context.begin()
            pieces.append(layer(part, context))
            context.commit(part.shape[1])
    # The most recent tokens of the cache are stored in bfloat16.
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=5e-3, rtol=0)


def test_format_without_blocks_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="bf16 rounds to no blocks; use one of: q8_0, q4_0, nf4, mixed"):
        AttentionLayerConfig(d_model=64, n_heads=4, cache_format="bf16")  # type: ignore[arg-type]


def test_generation_stores_its_cache_in_the_trained_format() -> None:
    options = {
        "d_model": 64,
        "n_heads": 4,
        "mode": "decoupled",
        "layout": "latent",
        "sem_dim": 32,
        "geo_dim": 32,
    }
    layer = {"type": "AttentionLayer", **options, "cache_format": "mixed"}
    node = {"type": "ResidualTopology", "layers": [{"type": "RMSNormLayer", "d_model": 64}, layer]}
    spec = ModelSpec.model_validate(
        {
            "embedder": {"vocab_size": 97, "d_model": 64},
            "topology": {"type": "StackedTopology", "layers": [node]},
        }
    )
    model = build_model(spec, seed=0)
    generator = Generator(model, max_new_tokens=8)
    generator.generate([[1, 2, 3]])
    assert generator.stats.cache_kind == "mixed"
    assert Generator(model, max_new_tokens=2, cache_kind="bf16").config.cache_kind is KVCacheKind.BF16
