"""The score op against a naive float64 loop: grouped heads, unequal widths, offsets and windows."""

from __future__ import annotations

import pytest
import torch

from caramba.layer import CausalScore, score, unplanned_attention


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
@pytest.mark.parametrize(("heads", "kv_heads", "width", "v_width"), [(4, 4, 6, 6), (4, 2, 6, 10), (6, 1, 10, 4)])
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
    leaves = [torch.randn(1, n, 6, d, dtype=torch.float64, requires_grad=True) for n, d in ((4, 4), (2, 4), (2, 6))]
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


@torch.inference_mode()
@pytest.mark.parametrize(("heads", "kv_heads", "v_width"), [(4, 2, 10), (6, 1, 6)])
def test_behind_a_prefix_no_mask_gives_what_a_mask_does(
    heads: int, kv_heads: int, v_width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (
        torch.randn(2, heads, 4, 6),
        torch.randn(2, kv_heads, 9, 6),
        torch.randn(2, kv_heads, 9, v_width),
    )
    null = torch.randn(kv_heads * 6), torch.randn(kv_heads * v_width)
    wanted = CausalScore()(q, k, v)
    masked = CausalScore(3)(q, k, v), CausalScore()(q, k, v, null)
    monkeypatch.setattr(score, "LOWER_RIGHT_ON", ("cpu",))
    monkeypatch.setattr(score, "_attend", None)  # what makes masks
    torch.testing.assert_close(CausalScore(9)(q, k, v), wanted)
    assert CausalScore()(q.half(), k.half(), v.half()).dtype == torch.float16
    monkeypatch.undo()
    monkeypatch.setattr(score, "LOWER_RIGHT_ON", ("cpu",))
    monkeypatch.setattr(score, "_attend_lower_right", None)  # a window or a null key keeps the mask
    assert torch.equal(CausalScore(3)(q, k, v), masked[0])
    assert torch.equal(CausalScore()(q, k, v, null), masked[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.inference_mode()
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "width", "v_width"),
    [
        (torch.bfloat16, 8, 2, 64, 64),
        (torch.float16, 6, 1, 100, 60),
        (torch.bfloat16, 4, 1, 416, 384),
        (torch.float32, 4, 2, 64, 64),
    ],
)
def test_prompts_behind_a_prefix_on_a_gpu(
    dtype: torch.dtype, heads: int, kv_heads: int, width: int, v_width: int
) -> None:
    q = (torch.randn(2, heads, 33, width) * width**-0.5).to("cuda", dtype)
    k, v = (torch.randn(2, kv_heads, 128, w).to("cuda", dtype)[:, :, :97] for w in (width, v_width))
    tolerance = 1e-4 if dtype == torch.float32 else 0.03
    for n_keys in (97, 33):
        part = k[:, :, :n_keys], v[:, :, :n_keys]
        wanted = naive(q.cpu(), *(x.cpu() for x in part), None)
        with unplanned_attention(q.device, 2 * 33 * n_keys), torch.profiler.profile() as profile:
            found = CausalScore()(q, *part)
        torch.testing.assert_close(found.double().cpu(), wanted, rtol=tolerance, atol=tolerance)
        called = {event.key for event in profile.key_averages()}
        assert "aten::_cudnn_attention_forward" not in called
        assert ("aten::_flash_attention_forward" in called) == (dtype != torch.float32 and width <= 256)
        assert "aten::repeat_interleave" not in called or dtype == torch.float32 or width > 256
