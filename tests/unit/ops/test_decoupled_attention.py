"""The op of attention over keys of two parts: its contract and its formula."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops import backend
from caramba.ops.decoupled_attention import (
    decoupled_attention,
    has_two_part_keys,
    reference_decoupled_attention,
)

OPS = torch.ops.caramba
B, T, S, H = 2, 5, 8, 4
A, G, D = 3, 6, 5
STARTS = torch.tensor([[0, 0, 2, 2, 4], [0, 1, 1, 1, 1]])
HEADS = [(4, 1, 4), (1, 1, 1), (2, 4, 1)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def arguments(
    n_keys: int = S, heads: tuple[int, int, int] = (4, 1, 4), n_queries: int = T, batch: int = B
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sem, geo, value = heads
    given = (
        drawn(batch, n_queries, H, A + G),
        drawn(batch, n_keys, sem, A, seed=1),
        drawn(batch, n_keys, geo, G, seed=2),
        drawn(batch, n_keys, value, D, seed=3),
    )
    for x in given:
        x.requires_grad_()
    return given


@pytest.mark.parametrize("first", [None, STARTS])
@pytest.mark.parametrize("heads", HEADS)
def test_contract_and_gradients(heads: tuple[int, int, int], first: Tensor | None) -> None:
    given = arguments(S if first is None else T, heads)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(OPS.decoupled_attention.default, (*given, first), test_utils=tests)
    plain = [x.detach() for x in given]
    kept = OPS.decoupled_attention.default(*plain, first)
    assert [x.dtype for x in kept] == [torch.float64, torch.float32]
    grad = drawn(B, H, T, D, seed=4).transpose(1, 2)  # of any strides
    torch.library.opcheck(OPS.decoupled_attention_backward.default, (grad, *plain, first, *kept), test_utils=tests[::2])
    assert torch.autograd.gradcheck(lambda q, sem, geo, v: decoupled_attention(q, sem, geo, v, first), given)
    assert not OPS.decoupled_attention.default(*given, first)[1].requires_grad


def joined(q: Tensor, k_sem: Tensor, k_geo: Tensor, v: Tensor, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What torch's attention makes of joined keys, and the scores' logsumexp."""
    k_sem, k_geo, v = (x.repeat_interleave(H // x.shape[2], dim=2).transpose(1, 2) for x in (k_sem, k_geo, v))
    k, n_queries, n_keys = torch.cat((k_sem, k_geo), dim=-1), q.shape[1], v.shape[2]
    mask = torch.ones(n_queries, n_keys, dtype=torch.bool).tril(n_keys - n_queries)
    if first is not None:
        mask = (mask & (torch.arange(n_keys) >= first[:, :, None]))[:, None]
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, scale=1.0)
    scores = (q.transpose(1, 2) @ k.mT).masked_fill(~mask, -math.inf)
    return out.transpose(1, 2), scores.logsumexp(-1)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    ("n_queries", "n_keys", "first"), [(5, 8, None), (5, 5, None), (5, 5, STARTS), (1, 7, None), (1, 1, None)]
)
def test_formula(heads: tuple[int, int, int], n_queries: int, n_keys: int, first: Tensor | None) -> None:
    given = arguments(n_keys, heads, n_queries)
    out = decoupled_attention(*given, first)
    want, lse = joined(*given, first)
    assert out.is_contiguous()
    torch.testing.assert_close(out, want, rtol=0, atol=1e-13)
    torch.testing.assert_close(OPS.decoupled_attention.default(*given, first)[1], lse.float())
    grad = drawn(*out.shape, seed=5)
    for ours, theirs, x in zip(
        torch.autograd.grad(out, given, grad), torch.autograd.grad(want, given, grad), given, strict=True
    ):
        assert ours.shape == x.shape
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("batch", "n_queries"), [(0, 5), (2, 0)])
def test_of_nothing(batch: int, n_queries: int) -> None:
    given = arguments(S, n_queries=n_queries, batch=batch)
    out = decoupled_attention(*given)
    assert out.shape == (batch, n_queries, H, D)
    found = torch.autograd.grad(out.sum(), given)
    assert [x.shape for x in found] == [x.shape for x in given]
    assert not any(x.any() for x in found)


def test_half_precision_is_rounded_once() -> None:
    given = [x.detach() for x in arguments()]
    half = [x.bfloat16() for x in given]
    out = decoupled_attention(*half)
    assert out.dtype == torch.bfloat16
    exact = decoupled_attention(*(x.double() for x in half))
    assert ((out.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()


def test_what_does_not_fit_is_refused() -> None:
    q, k_sem, k_geo, v = arguments()
    with pytest.raises(ConfigError, match=r"q is torch.int64 of shape .*expected floating \[B, T, H, A \+ G\]"):
        decoupled_attention(q.long(), k_sem, k_geo, v)
    for sem in (k_sem[:1], k_sem.squeeze(-1).sum(-1), k_sem[:, :, :3], k_sem[:, :, :0]):
        with pytest.raises(ConfigError, match=r"k_sem is \(.*expected \[2, \d, K, width\] with K heads that divide"):
            decoupled_attention(q, sem, k_geo, v)
    with pytest.raises(ConfigError, match=r"k_geo is \(2, 7, 1, 6\), expected \[2, 8, K, width\]"):
        decoupled_attention(q, k_sem, k_geo[:, 1:], v)
    with pytest.raises(ConfigError, match=r"v is torch.float32 on cpu, q torch.float64 on cpu"):
        decoupled_attention(q, k_sem, k_geo, v.float())
    with pytest.raises(ConfigError, match=r"keys of 3 \+ 4 features for queries of 9, expected as many"):
        decoupled_attention(q, k_sem, k_geo[..., :4], v)
    with pytest.raises(ConfigError, match="5 queries are the last of 4 positions"):
        decoupled_attention(q, k_sem[:, :4], k_geo[:, :4], v[:, :4])
    with pytest.raises(ConfigError, match=r"first is torch.int32 .*expected int64 \(2, 5\)"):
        decoupled_attention(q, k_sem, k_geo, v, STARTS.int())
    with pytest.raises(ConfigError, match="first with 5 queries on 8 keys, expected as many of both"):
        decoupled_attention(q, k_sem, k_geo, v, STARTS)


def test_kernels_take_what_their_tiles_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_two_part_keys(torch.bfloat16, 64, 256, 64)
    assert has_two_part_keys(torch.float16, 128, 256, 128)
    for refused in (
        (torch.float32, 64, 256, 64),
        (torch.bfloat16, 256, 256, 64),
        (torch.bfloat16, 64, 512, 64),
        (torch.bfloat16, 64, 256, 256),
        (torch.bfloat16, 8, 256, 64),
        (torch.bfloat16, 64, 192, 64),
        (torch.bfloat16, 64, 256, 48),
    ):
        assert not has_two_part_keys(*refused)
    given = arguments()
    want = decoupled_attention(*given)
    calls: list[object] = []

    def call(op: str, *inputs: Any) -> tuple[Tensor, Tensor]:
        calls.append(op)
        return reference_decoupled_attention(*inputs)

    # The package has a function of the module's name.
    monkeypatch.setattr(sys.modules[reference_decoupled_attention.__module__], "call_op", call)
    monkeypatch.setitem(backend._attached, ("decoupled_attention", "cpu"), "reference")
    got = decoupled_attention(*given)  # float64: plain PyTorch beside the kernel, gradients too
    assert torch.equal(got, want)
    assert got.requires_grad
    assert not calls
    q, *streams = (torch.ones(1, 3, 2, width, dtype=torch.bfloat16) for width in (32, 16, 16, 16))
    decoupled_attention(q, *streams)
    assert calls == ["decoupled_attention"]
