"""The op of attention joined with a known part: its contract, its formula, windows, documents, and the layer's use."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.layer.latent import attend_with_prefix
from caramba.layer.score import CausalScore
from caramba.ops.prefix_attention import has_fused_widths, prefix_attention
from tests.unit.ops.kernel_device import DEVICE, HAS_GPU

OPS = torch.ops.caramba
SHAPE = (2, 3, 7)


def random_inputs(
    qk: int = 6, value: int = 4, shape: tuple[int, int, int] = SHAPE, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    widths = ((qk, dtype), (qk, dtype), (value, dtype), (value, wide), (1, wide))
    found = [
        torch.randn(*shape, width, generator=generator, dtype=torch.float64).to(DEVICE, kind) for width, kind in widths
    ]
    return [x.requires_grad_() for x in found]


def windowed_inputs(
    n_queries: int, n_keys: int, dtype: torch.dtype = torch.float64, qk: int = 6, value: int = 4
) -> list[Tensor]:
    """Two query heads to each of two key/value heads; the first head has seen nothing elsewhere."""
    wide = torch.promote_types(dtype, torch.float32)
    q, _, _, prefix_out, prefix_lse = random_inputs(qk, value, (2, 4, n_queries), dtype)
    _, k, v, *_ = random_inputs(qk, value, (2, 2, n_keys), dtype)
    with torch.no_grad():
        q.mul_(qk**-0.5)
        prefix_lse[:, 0] = -1e30
    assert prefix_lse.dtype == wide
    return [q, k, v, prefix_out, prefix_lse]


def formula(inputs: list[Tensor], window: int | None, first: Tensor | None) -> Tensor:
    """Return one softmax over the known part, as one key, and the keys that each query sees."""
    q, k, v, prefix_out, prefix_lse = inputs
    n_queries, n_keys = q.shape[2], k.shape[2]
    places = torch.arange(n_keys - n_queries, n_keys, device=q.device)[:, None]
    keys = torch.arange(n_keys, device=q.device)
    hidden = (keys > places) | (keys <= places - (window or n_keys))
    if first is not None:
        hidden = (hidden | (keys < first[:, :, None]))[:, None]
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.cat((prefix_lse, (q @ k.mT).masked_fill(hidden, -torch.inf)), dim=-1).softmax(-1)
    return scores[..., :1] * prefix_out + scores[..., 1:] @ v


def documents_of(n_tokens: int) -> Tensor:
    """Return the first token of each token's document, for two rows."""
    begins = torch.zeros(2, n_tokens, dtype=torch.bool)
    begins[:, 0], begins[0, n_tokens // 3], begins[1, n_tokens // 2 :: 40] = True, True, True
    return torch.where(begins, torch.arange(n_tokens), 0).cummax(dim=1).values.to(DEVICE)


@pytest.mark.parametrize(("window", "documents"), [(None, False), (3, False), (3, True)])
def test_contract_and_gradients(window: int | None, documents: bool) -> None:
    # In float64 and on the CPU: a kernel takes 16 bits alone.
    given = random_inputs() if window is None else windowed_inputs(7, 7)
    inputs = [x.detach().cpu().requires_grad_() for x in given]
    options = window, documents_of(7).cpu() if documents else None
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(OPS.prefix_attention.default, (*inputs, *options), test_utils=tests)
    plain = [x.detach() for x in inputs]
    out, lse = OPS.prefix_attention.default(*plain, *options)
    assert not OPS.prefix_attention.default(*inputs, *options)[1].requires_grad
    torch.library.opcheck(
        OPS.prefix_attention_backward.default,
        (torch.randn_like(out), *plain[:3], out, lse, *options),
        test_utils=tests[::2],
    )
    assert torch.autograd.gradcheck(lambda *x: prefix_attention(*x, *options), inputs)


@pytest.mark.parametrize(
    ("n_queries", "n_keys", "window", "documents"),
    [
        *((301, 301, window, False) for window in (None, 1, 5, 130, 400)),
        *((1, 301, window, False) for window in (None, 5)),
        *((90, 301, window, False) for window in (None, 140)),
        *((301, 301, window, True) for window in (None, 140, 5)),
    ],
)
def test_windows_documents_and_groups_equal_the_formula(
    n_queries: int, n_keys: int, window: int | None, documents: bool
) -> None:
    inputs, first = windowed_inputs(n_queries, n_keys), documents_of(n_keys) if documents else None
    found, expected = prefix_attention(*inputs, window, first), formula(inputs, window, first)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad((out * weight).sum(), inputs) for out in (found, expected))
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("window", "first"), [(0, None), (2, torch.zeros(2, 6, dtype=torch.int64)), (None, documents_of(9))]
)
def test_window_and_documents_that_do_not_fit_are_refused(window: int | None, first: Tensor | None) -> None:
    with pytest.raises(ConfigError, match="prefix_attention: got window"):
        prefix_attention(*windowed_inputs(7, 7), window, first)


def test_formula_equals_one_softmax_over_prefix_and_keys() -> None:
    q, k, v, prefix_out, prefix_lse = (x.detach() for x in random_inputs())
    hidden = torch.ones(7, 7, dtype=torch.bool, device=DEVICE).triu(1)
    scores = torch.cat((prefix_lse, (q @ k.mT).masked_fill(hidden, -torch.inf)), dim=-1).softmax(-1)
    expected = scores[..., :1] * prefix_out + scores[..., 1:] @ v
    torch.testing.assert_close(prefix_attention(q, k, v, prefix_out, prefix_lse), expected)


def test_layer_form_with_an_extra_key_gives_the_same() -> None:
    q, k, v, kept, total = (x.detach() for x in random_inputs(shape=(2, 3, 9)))
    read, share = attend_with_prefix(CausalScore(), q, k, v, total, 2)
    expected = (read + share * kept)[:, :, 2:]
    got = prefix_attention(*(x[:, :, 2:] for x in (q, k, v, kept, total)))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


def test_a_prefix_of_16_bits_is_read_and_has_gradients_of_16_bits() -> None:
    q, k, v, kept, total = (x.detach() for x in windowed_inputs(7, 7, torch.bfloat16))
    given = [x.requires_grad_() for x in (q, k, v, kept.bfloat16(), total)]
    exact = [x.detach().double().requires_grad_() for x in given]
    found, expected = prefix_attention(*given, 3), formula(exact, 3, None)
    for out in (found, expected):
        out.backward(torch.ones_like(out))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-2)
    for got, want in zip(given, exact, strict=True):
        assert got.grad is not None
        assert want.grad is not None
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=2e-2, atol=4e-2)
    torch.library.opcheck(OPS.prefix_attention.default, (*given, 3, None), test_utils=("test_faketensor",))


@pytest.mark.parametrize("index", range(5))
def test_wrong_shape_or_dtype_is_refused(index: int) -> None:
    inputs = [x.detach() for x in random_inputs()]
    shorter = [x[:, :, 1:] if i == index else x for i, x in enumerate(inputs)]
    with pytest.raises(ConfigError, match="prefix_attention: got"):
        prefix_attention(*shorter)
    narrow = [x.float() if i == index else x for i, x in enumerate(inputs)]
    with pytest.raises(ConfigError, match="prefix_attention: got"):
        prefix_attention(*narrow)


def test_kernel_widths() -> None:
    assert has_fused_widths(torch.bfloat16, 128, 64)
    assert not has_fused_widths(torch.float32, 128, 64)
    assert not has_fused_widths(torch.bfloat16, 136, 64)
    assert not has_fused_widths(torch.bfloat16, 100, 64)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="cuDNN's attention needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("qk", "value"), [(128, 64), (96, 64), (72, 64)])
def test_cudnn_agrees_with_float64(qk: int, value: int, dtype: torch.dtype) -> None:
    from caramba.kernels.triton.prefix_attention import prefix_attention as forward
    from caramba.kernels.triton.prefix_attention import prefix_attention_backward as backward

    given = [x.detach() for x in random_inputs(qk, value, (2, 9, 301), dtype)]
    given[0] = given[0] * qk**-0.5
    exact = [x.double().requires_grad_() for x in given]
    expected = prefix_attention(*exact)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    out, lse = forward(*given, None, None)
    grads = backward(grad.to(dtype), *given[:3], out, lse, None, None)
    bound = 4e-3 if dtype is torch.float16 else 2e-2
    for got, want in zip((out, *grads), (expected, *(x.grad for x in exact[:3])), strict=True):
        assert want is not None
        error = (got.double() - want).norm() / want.norm()
        assert error < bound, error


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="flash attention needs a CUDA device")
@pytest.mark.parametrize("has_half_prefix", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("n_queries", "n_keys", "window", "documents", "qk", "value"),
    [
        (301, 301, 64, False, 64, 64),
        (301, 301, 400, False, 32, 32),
        (301, 301, 64, True, 64, 64),
        (301, 301, None, True, 64, 64),
        (90, 301, 64, False, 64, 32),
        (1, 301, 64, False, 64, 64),
        (301, 301, None, False, 20, 12),
    ],
)
def test_flash_agrees_with_float64(
    n_queries: int,
    n_keys: int,
    window: int | None,
    documents: bool,
    qk: int,
    value: int,
    dtype: torch.dtype,
    has_half_prefix: bool,
) -> None:
    from caramba.kernels.triton.prefix_attention import prefix_attention as forward
    from caramba.kernels.triton.prefix_attention import prefix_attention_backward as backward

    given = [x.detach() for x in windowed_inputs(n_queries, n_keys, dtype, qk, value)]
    given[3] = given[3].to(dtype) if has_half_prefix else given[3]
    options = window, documents_of(n_keys) if documents else None
    exact = [x.double().requires_grad_() for x in given]
    expected = formula(exact, *options)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    out, lse = forward(*given, *options)
    grads = backward(grad.to(dtype), *given[:3], out, lse, *options)
    bound = 4e-3 if dtype is torch.float16 else 2e-2
    for got, want in zip((out, *grads), (expected, *(x.grad for x in exact[:3])), strict=True):
        assert want is not None
        error = (got.double() - want).norm() / want.norm()
        assert error < bound, error
