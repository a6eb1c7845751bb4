"""The op of exact first tokens: its contract, its formula, and the pass that calls it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.lower import first_tokens as pass_module
from caramba.lower.lowering import lower
from caramba.model import Model
from caramba.ops import backend
from caramba.ops.first_tokens import first_tokens
from tests.unit.lower.test_norm_linear import lively

OPS = torch.ops.caramba
B, H, K, T, N, D = 2, 4, 2, 5, 3, 6


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def arguments() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    angles = drawn(1, T, D // 2, seed=4)
    k, v = (drawn(B, K, N, D, seed=seed).requires_grad_() for seed in (1, 2))
    mean = drawn(K, D, seed=3).requires_grad_()
    return drawn(B, H, T, D).requires_grad_(), k, v, mean, angles.cos(), angles.sin()


def test_contract_and_gradients() -> None:
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(OPS.first_tokens.default, arguments(), test_utils=tests)
    q, k, v, mean, cos, sin = (x.detach() for x in arguments())
    lse = first_tokens(q, k, v, mean, cos, sin)[1]
    grads = drawn(B, H, T, D, seed=5), drawn(B, H, T, 1, seed=6)
    torch.library.opcheck(
        OPS.first_tokens_backward.default, (*grads, q, k, v, mean, cos, sin, lse), test_utils=tests[::2]
    )
    assert torch.autograd.gradcheck(lambda q, k, v, mean: first_tokens(q, k, v, mean, cos, sin), arguments()[:4])


def test_formula() -> None:
    q, k, v, mean, cos, sin = (x.detach() for x in arguments())
    out, lse = first_tokens(q, k, v, mean, cos, sin)
    for b, h, t in torch.cartesian_prod(torch.arange(B), torch.arange(H), torch.arange(T)).tolist():
        group, first, second = h // (H // K), *q[b, h, t].chunk(2)
        turned = torch.complex(first, second) * torch.complex(cos[0, t], sin[0, t])
        rotated = torch.cat((turned.real, turned.imag))
        seen = min(t + 1, N)
        scores = k[b, group, :seen] @ rotated - q[b, h, t] @ mean[group]
        torch.testing.assert_close(out[b, h, t], scores.softmax(0) @ v[b, group, :seen])
        torch.testing.assert_close(lse[b, h, t, 0], scores.logsumexp(0))


def test_what_does_not_fit_is_refused() -> None:
    q, k, v, mean, cos, sin = arguments()
    with pytest.raises(ConfigError, match=r"q \(2, 4, 5, 6\), k \(2, 3, 3, 6\) .*K a divisor of H"):
        first_tokens(q, k[:, :1].expand(-1, 3, -1, -1), v[:, :1].expand(-1, 3, -1, -1), mean, cos, sin)
    with pytest.raises(ConfigError, match="n at most T"):
        first_tokens(q[:, :, :2], k, v, mean, cos[:, :2], sin[:, :2])
    with pytest.raises(ConfigError, match=r"got mean \(1, 6\) and cos \(1, 5, 3\); expected \(2, 6\)"):
        first_tokens(q, k, v, mean[:1], cos, sin)


def gradients(model: Model, tokens: Tensor) -> list[Tensor]:
    out = model(tokens)
    weights = [x for x in model.parameters() if x.requires_grad]
    return [out, *torch.autograd.grad(out, weights, drawn(*out.shape, seed=7).to(out.dtype), materialize_grads=True)]


@pytest.mark.parametrize("length", [9, 2])
def test_the_pass_gives_the_plain_numbers(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """In float64, where the reference takes the op's place; a sequence shorter than the first tokens stays plain."""
    model = lively("latent_first").double()
    tokens = torch.randint(model.spec.embedder.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    want = gradients(model, tokens)
    seen: list[torch.Size] = []

    def spy(q: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(q.shape)
        return first_tokens(q, *rest)  # pyright: ignore[reportCallIssue]

    monkeypatch.setitem(backend._attached, ("first_tokens", "cpu"), "reference")
    monkeypatch.setattr(pass_module, "has_narrow_heads", lambda *_: True)
    monkeypatch.setattr(pass_module, "first_tokens", spy)
    with lower(model, "cpu", "train"):
        for ours, wanted in zip(gradients(model, tokens), want, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9)
    assert bool(seen) == (length == 9)
