"""What ops do not differentiate, a second time or forward, they refuse: no derivative of theirs is wrong in silence."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from caramba.ops import backend
from caramba.ops.decoupled_attention import decoupled_attention
from caramba.ops.latent_queries import latent_queries
from caramba.ops.layer_norm import add_layer_norm, layer_norm
from caramba.ops.linear_cross_entropy import linear_cross_entropy
from caramba.ops.norm_dropout_activation import norm_dropout_activation
from caramba.ops.rms_norm import add_rms_norm, reference_rms_norm, reference_rms_norm_backward, rms_norm
from caramba.ops.rope import rope, rope_qkv
from caramba.ops.swiglu import swiglu

TARGETS = torch.tensor([0, 2, -100])


def drawn(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator, requires_grad=True)


def table(*shape: int) -> Tensor:
    return drawn(*shape).detach()


FIRST_ORDER: dict[str, tuple[Callable[..., Tensor | tuple[Tensor, ...]], tuple[Tensor, ...]]] = {
    "rms_norm": (rms_norm, (drawn(3, 4), drawn(4))),
    "add_rms_norm": (add_rms_norm, (drawn(3, 4), drawn(3, 4), drawn(4))),
    "layer_norm": (layer_norm, (drawn(3, 4), drawn(4), drawn(4))),
    "add_layer_norm": (add_layer_norm, (drawn(3, 4), drawn(3, 4), drawn(4), drawn(4))),
    "norm_dropout_activation": (
        lambda x, w: norm_dropout_activation(x, w, activation="silu", p=0.5, seed=1),
        (drawn(3, 4), drawn(4)),
    ),
    "swiglu": (swiglu, (drawn(3, 4), drawn(3, 4))),
    "swiglu_packed": (swiglu, (drawn(3, 4),)),
    "decoupled_attention": (
        decoupled_attention,
        (drawn(1, 3, 2, 6), drawn(1, 3, 1, 4), drawn(1, 3, 1, 2), drawn(1, 3, 1, 4)),
    ),
    "latent_queries": (
        lambda q, geo: latent_queries(q, geo, table(1, 3, 3), table(1, 3, 3), 0.5),
        (drawn(1, 3, 2, 4), drawn(2, 4, 6)),
    ),
    "linear_cross_entropy": (
        lambda hidden, weight: linear_cross_entropy(hidden, weight, TARGETS),
        (drawn(3, 4), drawn(7, 4)),
    ),
}


def total(found: Tensor | tuple[Tensor, ...]) -> Tensor:
    parts = found if isinstance(found, tuple) else (found,)
    return torch.stack([part.square().sum() for part in parts]).sum()


@pytest.mark.parametrize("op", FIRST_ORDER)
def test_a_second_derivative_is_refused(op: str) -> None:
    function, inputs = FIRST_ORDER[op]
    loss = total(function(*inputs))
    grads = torch.autograd.grad(loss, inputs, create_graph=True)
    plain = torch.autograd.grad(total(function(*inputs)), inputs)
    for ours, want in zip(grads, plain, strict=True):
        torch.testing.assert_close(ours, want)
    penalty = torch.stack([grad.square().sum() for grad in grads]).sum()
    with pytest.raises(NotImplementedError, match=f"{op}: its gradient cannot be differentiated"):
        torch.autograd.grad(penalty, inputs, retain_graph=True)
    # A sum that the first derivative is part of too, and nothing is asked for by name.
    with pytest.raises(NotImplementedError, match=f"{op}: its gradient cannot be differentiated"):
        (total(function(*inputs)) + penalty).backward()


def test_a_penalty_on_the_gradient_of_a_mean_is_refused_where_nothing_upstream_needs_a_gradient() -> None:
    hidden, weight = drawn(3, 4), drawn(7, 4)
    loss = linear_cross_entropy(hidden, weight, TARGETS)
    grads = torch.autograd.grad(loss, (hidden, weight), create_graph=True)
    with pytest.raises(NotImplementedError, match="linear_cross_entropy: its gradient cannot"):
        (loss + grads[0].square().sum() + grads[1].square().sum()).backward()


@pytest.mark.parametrize("by", ["features", "maps", "hidden", "weight"])
@pytest.mark.parametrize("of", [0, 1], ids=["of_hidden", "of_weight"])
def test_a_penalty_is_refused_where_only_some_derivatives_are_asked_for(by: str, of: int) -> None:
    """Trap: autograd.grad runs what leads to what it was asked for, and nothing led there from the kept gradients: the
    penalty was left out in silence. Without one the result is that of plain PyTorch."""
    leaves = {"features": drawn(3, 5), "maps": drawn(5, 4), "weight": drawn(7, 4), "bias": drawn(2)}

    def losses(function: Callable[[Tensor, Tensor], Tensor]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        hidden = leaves["features"] @ leaves["maps"]
        loss = function(hidden, leaves["weight"])
        grads = torch.autograd.grad(loss, (hidden, leaves["weight"]), create_graph=True)
        return {**leaves, "hidden": hidden}, loss + leaves["bias"].square().sum(), grads[of].square().sum()

    asked, loss, penalty = losses(lambda hidden, weight: linear_cross_entropy(hidden, weight, TARGETS))
    with pytest.raises(NotImplementedError, match="linear_cross_entropy: its gradient cannot"):
        torch.autograd.grad(loss + penalty, asked[by], retain_graph=True)
    with pytest.raises(NotImplementedError, match="linear_cross_entropy: its gradient cannot"):
        torch.autograd.grad(penalty, asked[by], retain_graph=True)

    plain, reference, theirs = losses(lambda hidden, weight: F.cross_entropy(hidden @ weight.t(), TARGETS))
    torch.testing.assert_close(penalty, theirs)
    for name in (by, "bias"):  # what the penalty does not hang on is right with it too
        ours, known = (loss + penalty.detach(), reference) if name == by else (loss + penalty, reference + theirs)
        (found,) = torch.autograd.grad(ours, asked[name], retain_graph=True)
        (wanted,) = torch.autograd.grad(known, plain[name], retain_graph=True)
        torch.testing.assert_close(found, wanted)


def test_what_refuses_it_keeps_no_hidden_features() -> None:
    hidden = drawn(64, 4) * 2.0
    loss = linear_cross_entropy(hidden, drawn(7, 4), torch.zeros(64, dtype=torch.int64))
    gone = weakref.ref(hidden)
    del hidden
    assert gone() is None
    loss.backward()


def test_a_launcher_that_runs_straight_away_refuses_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    place = ("rms_norm", "cpu")
    monkeypatch.setitem(backend.launchers, place, reference_rms_norm)
    monkeypatch.setitem(backend.launchers, ("rms_norm_backward", "cpu"), reference_rms_norm_backward)
    x, weight = drawn(3, 4), drawn(4)
    y = rms_norm(x, weight)
    assert "rms_norm_eager" in type(y.grad_fn).__name__ or "rms_norm_eager" in str(y.grad_fn)
    (grad,) = torch.autograd.grad(total(y), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="rms_norm: its gradient cannot"):
        grad.square().sum().backward()


def test_a_graph_of_gradients_is_kept_through_checkpointed_activations() -> None:
    """Whose hooks unpack what a backward reads once, and no second time."""
    x, weight = drawn(3, 4), drawn(4)
    y = checkpoint(lambda x: rms_norm(x, weight), x, use_reentrant=False)
    assert isinstance(y, Tensor)
    (found,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (wanted,) = torch.autograd.grad(rms_norm(x, weight).square().sum(), x)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("op", ["rope", "rope_qkv"])
def test_a_rotation_can_be_differentiated_again(op: str) -> None:
    cos, sin = table(1, 3, 2), table(1, 3, 2)
    if op == "rope":
        x = drawn(1, 2, 3, 4)
        torch.autograd.gradgradcheck(lambda x: rope(x, cos, sin).square(), x)
    else:
        x = drawn(1, 3, 16)
        torch.autograd.gradgradcheck(lambda x: total(rope_qkv(x, cos, sin, 2, 1)), x)


@pytest.mark.parametrize("op", [*FIRST_ORDER, "rope", "rope_qkv"])
def test_forward_mode_is_refused(op: str) -> None:
    cos, sin = table(1, 3, 2), table(1, 3, 2)
    rotations = {
        "rope": (lambda x: rope(x, cos, sin), (drawn(1, 2, 3, 4),)),
        "rope_qkv": (lambda x: rope_qkv(x, cos, sin, 2, 1), (drawn(1, 3, 16),)),
    }
    function, inputs = (FIRST_ORDER | rotations)[op]
    values = tuple(x.detach() for x in inputs)
    with pytest.raises(NotImplementedError, match=f"{op}: forward-mode derivatives"):
        torch.func.jvp(function, values, tuple(torch.ones_like(x) for x in values))


def test_dual_numbers_beside_an_op_are_none_of_its_business() -> None:
    x, y = table(3, 4), table(3, 4)

    def beside(x: Tensor) -> Tensor:
        return x * rms_norm(y)

    out, slope = torch.func.jvp(beside, (x,), (torch.ones_like(x),))[:2]
    torch.testing.assert_close(out, x * F.rms_norm(y, (4,), eps=1e-6))
    torch.testing.assert_close(slope, rms_norm(y))
