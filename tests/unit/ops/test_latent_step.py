"""The ops of a latent layer's decode step that are two ops in one: contracts, formulas, and the steps that call them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from caramba.cache import DeviceContext, KVCacheKind
from caramba.cache.view import CacheView
from caramba.errors import ConfigError
from caramba.infer.device_steps import find_angles, next_logits
from caramba.lower import absorb_latent as latent
from caramba.lower.lowering import lower
from caramba.model import Model, build_model
from caramba.ops import backend
from caramba.ops.absorbed_step import absorbed_queries, absorbed_step
from caramba.ops.dba_append import dba_append
from caramba.ops.dba_decode import StoredStream, dba_decode
from caramba.ops.dba_decode_up import dba_decode_up
from caramba.ops.small_batch_linear import per_head_linear
from tests.unit.model.model_specs import VOCAB, transformer

OPS = torch.ops.caramba
B, T, H, D, R, G, S = 3, 2, 2, 4, 6, 8, 5


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def step_arguments(*, is_joined: bool = True) -> dict[str, Any]:
    angles = drawn(B, 1, T, G // 2, seed=2)
    together = drawn(B, T, H * D + R + G)
    q, c, k_geo = together.split((H * D, R, G), dim=-1)
    widths = [R + G] if is_joined else [R, G]
    return {
        "q": q.unflatten(-1, (H, D)),
        "sem_map": drawn(H, D, R, seed=1),
        "geo_map": drawn(H, D, G, seed=3),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "scale": 0.5,
        "c": c[:, None],
        "k_geo": k_geo[:, None],
        "buffers": [drawn(B, 1, S, width, seed=5 + i) for i, width in enumerate(widths)],
        "lengths": torch.tensor([0, 4, 2], dtype=torch.int32),  # one of the second's two tokens has no place
    }


@pytest.mark.parametrize("is_joined", [True, False])
def test_a_step_is_its_queries_and_its_append(is_joined: bool) -> None:
    given = step_arguments(is_joined=is_joined)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(OPS.absorbed_step.default, tuple(given.values()), test_utils=tests)
    queries = {name: given[name] for name in ("q", "sem_map", "geo_map", "cos", "sin", "scale")}
    buffers = [one.clone() for one in given["buffers"]]
    dba_append([given["c"], given["k_geo"]], buffers, given["lengths"], given["cos"], given["sin"], 1)
    assert torch.equal(absorbed_step(**given), absorbed_queries(**queries))
    for found, wanted in zip(given["buffers"], buffers, strict=True):
        assert torch.equal(found, wanted)
    assert not torch.equal(given["buffers"][0], step_arguments(is_joined=is_joined)["buffers"][0])


def decode_arguments() -> dict[str, Any]:
    joined = drawn(B, 1, S, R + G, seed=6).float()
    c, k_geo = joined.split((R, G), dim=-1)
    return {
        "q_sem": drawn(B, H, T, R).float(),
        "q_geo": drawn(B, H, T, G, seed=1).float(),
        "c": StoredStream("fp32", c),
        "k_geo": StoredStream("fp32", k_geo),
        "up": drawn(H, R, D, seed=4).float(),
        "seqlens": torch.tensor([S, 2, 0], dtype=torch.int32),
    }


def test_what_is_read_is_mapped_by_head() -> None:
    given = decode_arguments()
    read, _ = dba_decode(given["q_sem"], given["q_geo"], given["c"], given["k_geo"], None, given["seqlens"], window=3)
    found = dba_decode_up(**given, window=3)
    assert torch.equal(found, per_head_linear(read.transpose(1, 2), given["up"]))
    wanted = torch.stack([read[:, h] @ given["up"][h] for h in range(H)], dim=2)
    torch.testing.assert_close(found, wanted)
    streams = [given[name].tensors for name in ("c", "k_geo")]
    args = (given["q_sem"], given["q_geo"], ["fp32", "fp32"], *streams, given["seqlens"], None, given["up"])
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(OPS.dba_decode_up.default, (*args, 0, 0, 0), test_utils=tests)


def test_what_does_not_fit_is_refused() -> None:
    given, read = step_arguments(), decode_arguments()

    def refused(match: str, **changed: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            absorbed_step(**(given | changed))

    refused(
        r"absorbed_step: sem_map is torch.float64 \(1, 4, 6\) on cpu, expected floating \[2, 4, R\]",
        sem_map=given["sem_map"][1:],
    )
    refused(
        r"absorbed_step: c is \(3, 1, 2, 5\) on cpu and k_geo .*expected \(3, 1, 2, 6\)",
        c=given["c"][..., 1:],
    )
    refused(
        r"buffers: got streams of width \[6, 8\], expected ones that fill widths \[13\]",
        buffers=[given["buffers"][0][..., :-1]],
    )
    refused(r"lengths: got torch.int64 \[3\] on cpu", lengths=given["lengths"].long())
    refused(r"absorbed_step: got inputs that require gradients", c=given["c"].clone().requires_grad_())
    with pytest.raises(ConfigError, match=r"dba_decode_up: up is \(2, 5, 4\) on cpu, expected \[2, 6, D\]"):
        dba_decode_up(**(read | {"up": read["up"][:, 1:]}))
    with pytest.raises(ConfigError, match=r"dba_decode_up: got inputs that require gradients"):
        dba_decode_up(**(read | {"up": read["up"].clone().requires_grad_()}))
    with pytest.raises(ConfigError, match=r"dba_decode: seqlens: got torch.int64"):
        dba_decode_up(**(read | {"seqlens": read["seqlens"].long()}))


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps on a CPU, of any dtype, take the ops as if they had kernels."""
    for op in ("absorbed_queries", "absorbed_step", "per_head_linear", "dba_decode_up"):
        monkeypatch.setitem(backend._attached, (op, "cpu"), "reference")
    monkeypatch.setattr(latent, "has_narrow_queries", lambda *_: True)
    monkeypatch.setattr(latent, "HALF_PRECISION", (torch.float64, torch.float16))


def stepped(model: Model, kind: KVCacheKind) -> Tensor:
    tokens = torch.randint(VOCAB, (3, 12), generator=torch.Generator().manual_seed(1))
    ctx = model.new_context(3, 12, kind, static=True, tail_tokens=4)
    model(tokens[:, :5], ctx)
    step, outputs = DeviceContext(ctx), []
    for t in range(5, 12):
        step.advance()
        outputs.append(model(tokens[:, t : t + 1], step))
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("kind", [KVCacheKind.FP32, KVCacheKind.MIXED])
@pytest.mark.usefixtures("with_kernels")
@torch.no_grad()
def test_steps_with_the_ops_are_those_without(kind: KVCacheKind, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def spied(place: Any, name: str) -> None:
        plain = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *a, **k: (called.append(name), plain(*a, **k))[1])

    spied(latent, "absorbed_step")
    spied(CacheView, "attend_up")
    model = build_model(transformer("latent"), seed=0).eval().double()
    with backend.without_kernels():
        wanted = stepped(model, kind)
    assert called == []
    with lower(model, "cpu", "decode"):
        torch.testing.assert_close(stepped(model, kind), wanted, rtol=1e-12, atol=1e-12)
    n_caches = len(model.new_context(1, 1, KVCacheKind.FP32).caches)
    assert called == ["absorbed_step", "attend_up"] * (7 * n_caches)


class _SeenError(Exception):
    """Ends a compilation once its graph is known: no code is made."""


@pytest.mark.parametrize("kind", [KVCacheKind.FP16, KVCacheKind.MIXED])
@pytest.mark.usefixtures("with_kernels")
@torch.no_grad()
def test_the_compiler_writes_into_the_cache_without_a_copy(kind: KVCacheKind, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.fx_passes import post_grad  # takes two seconds, in every process that collects

    graphs: list[Any] = []
    decompose = post_grad.decompose_auto_functionalized

    def seen(graph: Any) -> None:
        decompose(graph)
        graphs.append(graph)
        raise _SeenError

    monkeypatch.setattr(post_grad, "decompose_auto_functionalized", seen)
    torch._dynamo.reset()
    model = build_model(transformer("latent"), seed=0).eval().half()
    ctx = model.new_context(2, 16, kind, static=True, tail_tokens=4)
    model(torch.ones(2, 5, dtype=torch.int64), ctx)
    token, step = torch.ones(2, dtype=torch.int64), DeviceContext(ctx)
    find_angles(model, step)
    with lower(model, "cpu", "decode", is_compiled=True), pytest.raises(Exception, match="_SeenError"):
        torch.compile(next_logits, fullgraph=True)(model, token, step)
    torch._dynamo.reset()
    nodes = list(graphs[0].nodes)
    counts = {
        op: [node for node in nodes if node.target is getattr(OPS, op).default]
        for op in ("absorbed_step", "dba_decode_up", "dba_append", "dba_decode", "per_head_linear")
    }
    assert {op: len(found) for op, found in counts.items()} == {
        "absorbed_step": len(ctx.caches),
        "dba_decode_up": len(ctx.caches),
        "dba_append": 0,
        "dba_decode": 0,
        "per_head_linear": 0,
    }
    for node in counts["absorbed_step"]:
        assert all(buffer.op == "placeholder" for buffer in node.args[8])
    smallest = min(values.numel() for cache in ctx.caches for values in cache.allocations)
    for node in nodes:
        if node.target is torch.ops.aten.copy_.default and node.args[0].meta["val"].numel() >= smallest:
            assert node.args[0] is node.args[1], node.format_node()
