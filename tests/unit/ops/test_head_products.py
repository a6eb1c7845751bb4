"""The ops of a latent layer's decode step: their contracts, their formulas, and the steps that call them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from caramba import kernels
from caramba.cache import DeviceContext, KVCacheKind
from caramba.errors import ConfigError
from caramba.infer.device_steps import compile_logits, find_angles, next_logits
from caramba.lower import absorb_latent as latent
from caramba.lower.lowering import lower
from caramba.model import build_model
from caramba.ops import backend
from caramba.ops.absorbed_step import absorbed_queries
from caramba.ops.latent_queries import latent_queries
from caramba.ops.small_batch_linear import per_head_linear
from tests.unit.model.model_specs import VOCAB, transformer

OPS = torch.ops.caramba
B, T, H, D, R, G = 2, 3, 2, 4, 5, 6


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_contracts_and_formulas() -> None:
    angles = drawn(B, 1, T, G // 2, seed=2)
    q = drawn(B, T, 3 + H * D)[..., 3:].unflatten(-1, (H, D))  # a part of a wider product
    sem_map, geo_map, up = drawn(H, D, R, seed=1), drawn(H, D, G, seed=3), drawn(H, R, D, seed=4)
    given = (q, sem_map, geo_map, angles.cos(), angles.sin(), 0.5)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(OPS.absorbed_queries.default, given, test_utils=tests)
    y = absorbed_queries(*given)
    apart = latent_queries(q, *given[2:])
    assert torch.equal(y[..., R:], apart[..., D:])
    wanted = torch.stack([(q[:, :, h] * 0.5) @ sem_map[h] for h in range(H)], dim=2)
    torch.testing.assert_close(y[..., :R], wanted, rtol=1e-13, atol=1e-13)
    read = drawn(B, H, T, R, seed=5).transpose(1, 2)
    torch.library.opcheck(OPS.per_head_linear.default, (read, up), test_utils=tests)
    values = torch.stack([read[:, :, h] @ up[h] for h in range(H)], dim=2)
    torch.testing.assert_close(per_head_linear(read, up), values, rtol=1e-13, atol=1e-13)


def test_what_does_not_fit_is_refused() -> None:
    q, maps, table = drawn(B, T, H, D), drawn(H, D, G), drawn(1, T, G // 2)
    with pytest.raises(
        ConfigError,
        match=r"absorbed_queries: sem_map is torch.float64 \(1, 4, 6\) on cpu, expected floating \[2, 4, R\]",
    ):
        absorbed_queries(q, maps[1:], maps, table, table, 1.0)
    with pytest.raises(
        ConfigError,
        match=r"absorbed_queries: geo_map is torch.float64 of shape \(2, 4, 5\), expected floating \[2, 4, G\]",
    ):
        absorbed_queries(q, maps, maps[..., 1:], table, table, 1.0)
    with pytest.raises(ConfigError, match=r"absorbed_queries: got inputs that require gradients"):
        absorbed_queries(q, maps.clone().requires_grad_(), maps, table, table, 1.0)
    with pytest.raises(ConfigError, match=r"per_head_linear: x is torch.int64 of shape .*floating \[B, T, H, R\]"):
        per_head_linear(q.long(), maps)
    with pytest.raises(
        ConfigError,
        match=r"per_head_linear: weight is torch.float64 \(2, 3, 6\) on cpu, expected floating \[2, 4, D\]",
    ):
        per_head_linear(q, maps[:, 1:])


@pytest.mark.parametrize("name", ["latent", "latent_gate"])
@torch.no_grad()
def test_steps_with_the_ops_are_those_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(transformer(name), seed=0).eval().double()
    tokens = torch.randint(VOCAB, (3, 9), generator=torch.Generator().manual_seed(1))
    seen: list[str] = []

    def spy(name: str, op: object) -> object:
        return lambda *given: (seen.append(name), op(*given))[1]  # type: ignore[operator]

    def stepped() -> Tensor:
        ctx = model.new_context(3, 9, KVCacheKind.FP32, static=True)
        model(tokens[:, :5], ctx)
        step, outputs = DeviceContext(ctx), []
        for t in range(5, 9):
            step.advance()
            outputs.append(model(tokens[:, t : t + 1], step))
        return torch.cat(outputs, dim=1)

    wanted = stepped()
    for op, function in (("absorbed_queries", "absorbed_queries"), ("per_head_linear", "per_head_linear")):
        monkeypatch.setitem(backend._attached, (op, "cpu"), "reference")
        monkeypatch.setattr(latent, function, spy(op, getattr(latent, function)))
    monkeypatch.setattr(latent, "has_narrow_queries", lambda *_: True)
    monkeypatch.setattr(latent, "HALF_PRECISION", (torch.float64,))
    with lower(model, "cpu", "decode"):
        torch.testing.assert_close(stepped(), wanted, rtol=1e-12, atol=1e-12)
    n_steps = 4 * len(model.new_context(1, 1, KVCacheKind.FP32).caches)
    # A gate weighs the two paths of the queries; what is read has one.
    assert seen.count("absorbed_queries") == (n_steps if name == "latent" else 0)
    assert seen.count("per_head_linear") == n_steps


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("batch", [1, 2, 33])
@torch.inference_mode()
def test_steps_in_16_bits_on_a_gpu(batch: int) -> None:
    kernels.load("cuda")
    model = build_model(transformer("latent"), seed=0).eval().bfloat16().cuda()
    tokens = torch.randint(VOCAB, (batch, 9), generator=torch.Generator().manual_seed(1)).cuda()

    def stepped(*, is_compiled: bool = False) -> Tensor:
        ctx = model.new_context(batch, 9, KVCacheKind.BF16, static=True)
        model(tokens[:, :5], ctx)
        step, outputs, run = DeviceContext(ctx), [], next_logits
        if is_compiled:
            find_angles(model, step)
            run = compile_logits(model, batch, "steps in 16 bits")
        for t in range(5, 9):
            step.advance()
            outputs.append(run(model, tokens[:, t], step).float())
        return torch.stack(outputs, dim=1)

    with backend.without_kernels("absorbed_queries", "per_head_linear", "small_batch_linear"):
        wanted = stepped()
    with lower(model, "cpu", "decode", is_compiled=True):
        for is_compiled in (False, True):
            torch.testing.assert_close(stepped(is_compiled=is_compiled), wanted, rtol=0.05, atol=0.02)
