"""The score op against a naive float64 loop: grouped heads, unequal widths, offsets and windows."""

from __future__ import annotations

import pytest
import torch

from caramba.layer import CausalScore


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """softmax over the visible keys, one query and head at a time, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    batch, heads, n_queries, _ = q.shape
    n_kv_heads, n_keys = k.shape[1], k.shape[2]
    out = torch.zeros(batch, heads, n_queries, v.shape[-1], dtype=torch.float64)
    for b in range(batch):
        for head in range(heads):
            group = head // (heads // n_kv_heads)
            for t in range(n_queries):
                last = n_keys - n_queries + t
                first = 0 if window is None else max(0, last - window + 1)
                weights = torch.softmax(k[b, group, first : last + 1] @ q[b, head, t], dim=0)
                out[b, head, t] = weights @ v[b, group, first : last + 1]
    return out


@pytest.mark.parametrize(("n_queries", "n_keys"), [(1, 1), (5, 5), (1, 9), (4, 9), (9, 9)])
@pytest.mark.parametrize("window", [None, 1, 3, 9, 20])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "v_width"), [(4, 4, 6, 6), (4, 2, 6, 10), (6, 1, 10, 4)]
)
def test_equals_naive_reference(
    n_queries: int, n_keys: int, window: int | None, heads: int, kv_heads: int, width: int, v_width: int
) -> None:
    generator = torch.Generator().manual_seed(n_keys)
    q = torch.randn(2, heads, n_queries, width, generator=generator)
    k = torch.randn(2, kv_heads, n_keys, width, generator=generator)
    v = torch.randn(2, kv_heads, n_keys, v_width, generator=generator)
    expected = naive(q, k, v, window)
    out = CausalScore(window)(q, k, v)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    half = CausalScore(window)(q.bfloat16(), k.bfloat16(), v.bfloat16())
    torch.testing.assert_close(half.double(), expected, rtol=0.05, atol=0.05)
    assert half.dtype == torch.bfloat16


def test_keys_of_a_cache_in_another_dtype_are_read_in_the_query_dtype() -> None:
    q, k, v = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    out = CausalScore()(q, k.half(), v.half())
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), naive(q, k.half(), v.half(), None), rtol=1e-5, atol=1e-5)


def test_gradients_equal_the_naive_reference() -> None:
    torch.manual_seed(0)
    leaves = [
        torch.randn(1, n, 6, d, dtype=torch.float64, requires_grad=True) for n, d in ((4, 4), (2, 4), (2, 6))
    ]
    weight = torch.randn(1, 4, 6, 6, dtype=torch.float64)
    ours = torch.autograd.grad((CausalScore(3)(*leaves) * weight).sum(), leaves)
    q, k, v = leaves
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2)
    distance = torch.arange(6)[:, None] - torch.arange(6)
    weights = scores.masked_fill((distance < 0) | (distance >= 3), -torch.inf).softmax(-1)
    theirs = torch.autograd.grad(((weights @ v.repeat_interleave(2, 1)) * weight).sum(), leaves)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_dropout_acts_in_training_only() -> None:
    q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    score = CausalScore(dropout=0.5)
    assert not torch.equal(score(q, k, v), score(q, k, v))
    assert torch.equal(score.eval()(q, k, v), CausalScore()(q, k, v))
