"""Ops and quantised caches on a CUDA device: the same codes, bytes and tokens as on the CPU."""

from __future__ import annotations

import pytest
import torch

from caramba import kernels
from caramba.cache import Context, KVCacheKind, new_layer_cache
from caramba.config.layer import AttentionLayerConfig, AttentionMode
from caramba.ops.formats import STORED, dequantize, hadamard, quantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DIMS = AttentionLayerConfig(
    d_model=64, n_heads=4, mode=AttentionMode.DECOUPLED, sem_dim=32, geo_dim=64, v_dim=128
).dims()


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_and_values_equal_the_cpu(kind: str, dtype: torch.dtype) -> None:
    kernels.load("cuda")
    x = torch.randn(37, 3, 200, generator=torch.Generator().manual_seed(0)).to(dtype)
    here, there = quantize(x, kind), quantize(x.cuda(), kind)
    for ours, theirs in zip(there, here, strict=True):
        assert ours.is_cuda
        assert torch.equal(ours.cpu(), theirs)
    values = dequantize(*there, kind, 200, torch.float32)
    assert torch.equal(values.cpu(), dequantize(*here, kind, 200, torch.float32))
    torch.testing.assert_close(hadamard(x.cuda()).cpu(), hadamard(x))
    assert dequantize(*quantize(x[:0].cuda(), kind), kind, 200).shape == (0, 3, 200)


@pytest.mark.parametrize("kind", [KVCacheKind.Q8_0, KVCacheKind.NF4, KVCacheKind.MIXED])
def test_a_cache_holds_what_it_holds_on_the_cpu(kind: KVCacheKind) -> None:
    caches = {
        device: new_layer_cache(DIMS, 2, 300, kind, device, static=True, tail_tokens=16, hadamard=True)
        for device in ("cpu", "cuda")
    }
    streams = {name: torch.randn(2, heads, 250, width) for name, heads, width in DIMS.streams}
    for start, end in ((0, 100), (100, 101), (101, 130), (130, 250)):
        for device, cache in caches.items():
            cache.append({name: x[:, :, start:end].to(device) for name, x in streams.items()})
    for cache in caches.values():
        cache.truncate(245)
        cache.select(torch.tensor([1, 0, 1], device=cache.tensors["v"].device))
    for name, ours in caches["cuda"].read().items():
        torch.testing.assert_close(ours.cpu(), caches["cpu"].read()[name], rtol=1e-5, atol=1e-5)
    assert caches["cuda"].used_bytes == caches["cpu"].used_bytes
    before = torch.cuda.memory_allocated()
    ctx = Context([new_layer_cache(DIMS, 2, 4096, kind, "cuda", static=True)])
    taken = torch.cuda.memory_allocated() - before
    assert ctx.nbytes() <= taken < ctx.nbytes() + 9 * 512  # the allocator rounds each buffer up to 512 bytes
