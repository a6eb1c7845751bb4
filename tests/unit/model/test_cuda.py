"""The model stack on a CUDA device: scores, cached decoding, autocast, and frequencies that follow the device."""

from __future__ import annotations

import copy

import pytest
import torch
from model_specs import ATTENTION, VOCAB, block, spec, transformer
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from caramba.cache import Context, KVCacheKind, new_layer_cache
from caramba.config.layer import AttentionLayerConfig
from caramba.infer import greedy
from caramba.layer import AttentionLayer, CausalScore
from caramba.model import build_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FLASH, EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
TOKENS = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def exact_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize(("heads", "kv_heads", "width", "v_width"), [(4, 4, 64, 64), (4, 2, 24, 40), (4, 1, 40, 24)])
@pytest.mark.parametrize(("n_queries", "window"), [(1, None), (33, None), (130, None), (130, 17), (1, 17)])
def test_score_and_gradient_equal_the_cpu_in_float64(
    n_queries: int,
    window: int | None,
    heads: int,
    kv_heads: int,
    width: int,
    v_width: int,
    dtype: torch.dtype,
    bound: float,
) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = [(heads, n_queries, width), (kv_heads, 130, width), (kv_heads, 130, v_width)]
    leaves = [(torch.randn(2, *shape, generator=generator) / 2).to(dtype).double().requires_grad_() for shape in shapes]
    on_gpu = [leaf.detach().to("cuda", dtype).requires_grad_() for leaf in leaves]
    expected, out = CausalScore(window)(*leaves), CausalScore(window)(*on_gpu)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=bound, atol=bound)
    expected.sum().backward()
    out.sum().backward()
    for ours, theirs in zip(on_gpu, leaves, strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.double().cpu(), theirs.grad, rtol=10 * bound, atol=10 * bound)


@pytest.mark.parametrize("name", ATTENTION)
def test_forward_equals_the_cpu_and_cached_decoding_equals_both(name: str) -> None:
    model = build_model(spec({"type": "CyclicTopology", "layers": [block(name)], "n_cycles": 2}), seed=0).eval()
    with torch.no_grad():
        expected = model(TOKENS)
        model.cuda()
        tokens, ctx = TOKENS.cuda(), model.new_context(2, 9)
        torch.testing.assert_close(model(tokens).cpu(), expected, rtol=1e-4, atol=1e-5)
        out = torch.cat([model(part, ctx) for part in tokens.split([1, 4, 1, 3], dim=1)], dim=1)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(greedy(model, tokens, 4).cpu(), greedy(model.cpu(), TOKENS, 4))


def test_a_seed_gives_the_same_model_on_the_device() -> None:
    state = torch.cuda.get_rng_state()
    here, there = (
        build_model(transformer("decoupled"), seed=1),
        build_model(transformer("decoupled"), seed=1, device="cuda"),
    )
    assert torch.equal(torch.cuda.get_rng_state(), state)
    for (name, a), b in zip(here.state_dict().items(), there.state_dict().values(), strict=True):
        assert b.is_cuda
        assert torch.equal(a, b.cpu()), name
    empty = build_model(transformer("gqa_scaled"), device="meta").to_empty(device="cuda")
    buffers: dict[str, torch.Tensor] = dict(build_model(transformer("gqa_scaled")).named_buffers())
    assert buffers
    for name, buffer in empty.named_buffers():
        assert torch.equal(buffer.cpu(), buffers[name])


@pytest.mark.parametrize(
    ("geo", "training", "decode"),
    [(64, FLASH, FLASH), (32, FLASH, FLASH), (256, EFFICIENT, EFFICIENT)],
)
def test_both_latent_forms_take_a_fused_backend(geo: int, training: SDPBackend, decode: SDPBackend) -> None:
    """The shapes of Llama 3.2 1B: 64 + geo wide keys of every head, and 128 + geo wide ones that all heads share."""
    fields = {"mode": "decoupled", "layout": "latent", "d_model": 2048, "n_heads": 32, "head_dim": 64}
    config = AttentionLayerConfig.model_validate({**fields, "sem_dim": 128, "geo_dim": geo})
    layer, x = AttentionLayer(config).cuda(), torch.randn(2, 256, 2048, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        with sdpa_kernel(training):
            layer(x).float().square().mean().backward()
        cache = new_layer_cache(layer.dims, 2, 512, KVCacheKind.BF16, "cuda", static=True)
        ctx = Context([cache])
        with torch.no_grad(), sdpa_kernel(training):
            ctx.begin()
            layer(x, ctx)
            ctx.commit(256)
        with torch.no_grad(), sdpa_kernel(decode):
            ctx.begin()
            out = layer(x[:, :1], ctx)
            whole = layer(torch.cat((x, x[:, :1]), dim=1))[:, -1:]
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in layer.parameters())
    torch.testing.assert_close(out, whole, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("name", ["gqa_scaled", "decoupled_gate", "window", "latent", "latent_gate"])
def test_autocast_trains(name: str) -> None:
    model: nn.Module = build_model(transformer(name), seed=0, device="cuda")
    expected = model(TOKENS.cuda())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(TOKENS.cuda())
    logits.float().logsumexp(-1).sum().backward()
    torch.testing.assert_close(logits.float(), expected, rtol=0.05, atol=0.01)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("compiled", [False, True])
def test_packed_documents_equal_the_cpu(name: str, compiled: bool) -> None:
    """The masked backends of the device, over rows of documents and padding: values and gradients."""
    model = build_model(transformer(name), seed=0)
    on_gpu = copy.deepcopy(model).cuda()
    ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, -1], [5] * 9])
    expected = model.double()(TOKENS, documents=ids)
    run = torch.compile(on_gpu) if compiled else on_gpu
    out = run(TOKENS.cuda(), documents=ids.cuda())
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-4, atol=1e-4)
    expected.square().sum().backward()
    out.square().sum().backward()
    for ours, theirs in zip(on_gpu.parameters(), model.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.double().cpu(), theirs.grad, rtol=1e-3, atol=1e-3)
