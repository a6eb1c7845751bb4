"""Layers of llama32_dba's widths on a GPU: with the kernels of keys in two parts and without them the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from caramba import kernels
from caramba.cache import Context, LatentLayerKVCache, new_layer_cache
from caramba.config.kvcache import KVCacheKind
from caramba.config.layer import AttentionLayerConfig
from caramba.layer import AttentionLayer, Documents, attention_backends
from caramba.lower import split_keys
from caramba.lower.lowering import lower
from caramba.ops import backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OP = "decoupled_attention"
GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[None]]:
    """With kernels attached, a list of the op's eager calls; nothing stays compiled."""
    kernels.load("cuda")
    seen: list[None] = []
    op = split_keys.decoupled_attention

    def spy(*tensors: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            seen.append(None)
        return op(*tensors)

    monkeypatch.setattr(split_keys, OP, spy)
    yield seen
    torch.compiler.reset()


def build(**fields: Any) -> AttentionLayer:
    torch.manual_seed(0)
    dims = {"d_model": 512, "n_heads": 8, "head_dim": 64, "sem_dim": 128, "geo_dim": 256}
    config = AttentionLayerConfig.model_validate({"mode": "decoupled", "layout": "latent", **dims, **fields})
    layer = AttentionLayer(config).to(GPU)
    for name, parameter in layer.named_parameters():
        if name.endswith("weight"):
            torch.nn.init.normal_(parameter, std=512**-0.5)
    lower(layer, GPU, "train")
    return layer


def features(n_tokens: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(2, n_tokens, 512, device=GPU, generator=torch.Generator(GPU).manual_seed(1)).to(dtype)


def both_ways(layer: Callable[..., Tensor], parameters: Sequence[Tensor], x: Tensor, ctx: Any) -> list[Tensor]:
    x = x.detach().requires_grad_()
    out = layer(x, ctx)
    grad = torch.randn(out.shape, device=GPU, generator=torch.Generator(GPU).manual_seed(2)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [x, *parameters], grad)]


def assert_same(ours: list[Tensor], plain: list[Tensor]) -> None:
    for i, (one, other) in enumerate(zip(ours, plain, strict=True)):
        assert one.dtype == other.dtype
        error = (one.float() - other.float()).norm() / other.float().norm()
        assert error < 0.03, f"tensor {i}, {tuple(one.shape)}: {float(error):.3g}"


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("fields", [{}, {"sem_dim": 32}], ids=["expanded", "absorbed"])
def test_training(
    calls: list[None], fields: dict[str, int], is_compiled: bool, is_autocast: bool, has_documents: bool
) -> None:
    layer = build(**fields)
    layer = layer if is_autocast else layer.bfloat16()
    x = features(700, torch.float32 if is_autocast else torch.bfloat16)
    parameters = list(layer.parameters())
    with attention_backends(GPU), torch.autocast("cuda", torch.bfloat16, enabled=is_autocast):
        ids = (torch.arange(700, device=GPU) // 150).expand(2, -1)
        documents = Documents.of(ids) if has_documents else None
        run = torch.compile(layer, fullgraph=True) if is_compiled else layer
        ours = both_ways(run, parameters, x, documents)
        assert len(calls) == (0 if is_compiled else 1)
        with backend.without_kernels(OP):
            plain = both_ways(layer, parameters, x, documents)
    assert len(calls) == (0 if is_compiled else 1)
    assert_same(ours, plain)


@pytest.mark.parametrize("geo_dim", [64, 256])
@pytest.mark.parametrize("sizes", [[600, 300, 100], [1000], [900, 50, 50]])
def test_prompts_in_chunks(calls: list[None], sizes: list[int], geo_dim: int) -> None:
    layer, x = build(geo_dim=geo_dim).bfloat16(), features(1000, torch.bfloat16)

    def run() -> Tensor:
        cache = new_layer_cache(layer.dims, 2, 1000, KVCacheKind.BF16, device=GPU)
        assert isinstance(cache, LatentLayerKVCache)
        ctx, outs = Context([cache]), []
        for part in x.split(sizes, dim=1):
            ctx.begin()
            outs.append(layer(part, ctx))
            ctx.commit(part.shape[1])
        return torch.cat(outs, dim=1)

    with torch.inference_mode():
        ours = run()
        # Narrow keys behind a prefix alone, and few queries read them where they lie joined.
        assert len(calls) == (len(sizes) if geo_dim == 256 else sum(size > 128 for size in sizes[1:]))
        with backend.without_kernels(OP):
            assert_same([ours], [run()])
