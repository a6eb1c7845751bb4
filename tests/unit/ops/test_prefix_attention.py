"""The op of attention after a prefix: its contract, its formula, and the layer's use of it."""

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
        torch.randn(*shape, width, generator=generator, dtype=torch.float64).to(DEVICE, kind)
        for width, kind in widths
    ]
    return [x.requires_grad_() for x in found]


def test_contract_and_gradients() -> None:
    inputs = random_inputs()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(OPS.prefix_attention.default, tuple(inputs), test_utils=tests)
    plain = [x.detach() for x in inputs]
    out, lse = OPS.prefix_attention.default(*plain)
    assert not OPS.prefix_attention.default(*inputs)[1].requires_grad
    torch.library.opcheck(
        OPS.prefix_attention_backward.default,
        (torch.randn_like(out), *plain[:3], out, lse),
        test_utils=tests[::2],
    )
    assert torch.autograd.gradcheck(prefix_attention, inputs)


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
    out, lse = forward(*given)
    grads = backward(grad.to(dtype), *given[:3], out, lse)
    bound = 4e-3 if dtype is torch.float16 else 2e-2
    for got, want in zip((out, *grads), (expected, *(x.grad for x in exact[:3])), strict=True):
        assert want is not None
        error = (got.double() - want).norm() / want.norm()
        assert error < bound, error
