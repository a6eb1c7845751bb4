"""Optimisers against pytorch-optimizer 4.1.0 and torch in float64; each deviation is named and derived."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from caramba.config.train import PhaseConfig
from caramba.optim import AdaGC, build_optimizer, muon
from caramba.optim.lion import Lion
from caramba.optim.muon import MuonAdamW
from caramba.optim.swats import SWATS

STEPS = 100
peer = pytest.mark.skipif(
    find_spec("pytorch_optimizer") is None,
    reason="pytorch-optimizer is not installed: pip install --no-deps pytorch-optimizer==4.1.0",
)


def weights(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]


def run(optimizer: torch.optim.Optimizer, ours: list[nn.Parameter], steps: int, clip: Any = None) -> None:
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        for at, value in enumerate(ours):
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            value.grad = (at + 1.0) * value.detach() + 0.3 * noise
        if clip is not None:
            clip([ours])
        optimizer.step()


def assert_equal(ours: list[nn.Parameter], theirs: list[nn.Parameter], rtol: float) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=rtol, atol=1e-12)


@peer
def test_lion() -> None:
    from pytorch_optimizer import Lion as Peer

    ours, theirs = weights((4, 5), (7,)), weights((4, 5), (7,))
    run(Lion(ours, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1), ours, STEPS)
    run(Peer(theirs, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1), theirs, STEPS)
    assert_equal(ours, theirs, 1e-6)


@peer
@pytest.mark.parametrize("tolerance", [1e-12, 3e-3])
def test_swats_of_one_tensor(tolerance: float) -> None:
    """The peer's `eps` is Adam's and the switch's, and it compares relative to the rate; here they are two."""
    from pytorch_optimizer import SWATS as PEER

    ours, theirs = weights((4, 5)), weights((4, 5))
    optimizer = SWATS(ours, lr=1e-2, betas=(0.9, 0.99), eps=1e-9, tolerance=tolerance)
    run(optimizer, ours, STEPS)
    other = PEER(theirs, lr=1e-2, betas=(0.9, 0.99), eps=1e-9, foreach=False)
    run(other, theirs, STEPS if tolerance < 1e-9 else 1)
    if tolerance < 1e-9:  # neither switches, and both step by Adam
        assert optimizer.sgd_rate is None
        assert_equal(ours, theirs, 1e-6)
        return
    # Its part of SGD, from the point at which ours has switched: the same rate, velocity 0, the same gradients.
    assert optimizer.sgd_rate is not None
    ours, theirs = weights((4, 5)), weights((4, 5))
    optimizer = SWATS(ours, lr=1e-2, betas=(0.9, 0.99), eps=1e-9, tolerance=tolerance)
    optimizer.param_groups[0].update(sgd_rate=0.05, lr_at_switch=1e-2, k=9)
    other = PEER(theirs, lr=0.05, betas=(0.9, 0.99), foreach=False)
    other.param_groups[0]["phase"] = "sgd"
    run(optimizer, ours, STEPS)
    run(other, theirs, STEPS)
    assert_equal(ours, theirs, 1e-6)


@peer
def test_swats_of_several_tensors_has_one_rate_where_the_peer_takes_the_last_tensors() -> None:
    """The paper's dot products are over all weights; the peer's are of a tensor, and the last to settle sets the rate."""
    from pytorch_optimizer import SWATS as PEER

    ours, theirs = weights((4, 5), (7,)), weights((4, 5), (7,))
    other = PEER(theirs, lr=1e-2, betas=(0.9, 0.99), eps=0.5, foreach=False)
    run(other, theirs, STEPS)
    assert other.param_groups[0]["phase"] == "sgd"
    rates = [float(other.state[p]["exp_avg2"]) for p in theirs]
    assert max(rates) / min(rates) > 1.05, "the tensors disagree on the rate"
    optimizer = SWATS(ours, lr=1e-2, betas=(0.9, 0.99), tolerance=3e-3)
    run(optimizer, ours, STEPS)
    assert len({group["sgd_rate"] for group in optimizer.param_groups}) == 1


@peer
def test_adagc_with_adamw() -> None:
    """Equal over the warm-up and after it, but for `eps` that the peer adds to norms: 1e-8 of a norm of about 1.

    The peer ends the warm-up one step earlier, since it counts steps from 1 and asks for fewer than `warmup_steps`.
    """
    from pytorch_optimizer import AdaGC as Peer

    ours, theirs = weights((4, 5), (7,)), weights((4, 5), (7,))
    clip = AdaGC(ours, beta=0.98, relative=1.05, warmup_steps=10, max_norm=1.0)
    adamw = torch.optim.AdamW(ours, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    run(adamw, ours, STEPS, clip)
    run(Peer(theirs, lr=1e-2, betas=(0.9, 0.99), warmup_steps=11, weight_decay=0.1), theirs, STEPS)
    assert_equal(ours, theirs, 1e-6)


@peer
def test_adafactor() -> None:
    """torch's Adafactor, which `optimizer=adafactor` is, steps by max(eps2, RMS(w)) min(lr, 1 / sqrt(k)): as the peer's
    with `scale_parameter` alone, while lr is the less of the two. Both raise beta2 as 1 - k^-0.8."""
    from pytorch_optimizer import AdaFactor as Peer

    shapes = ((4, 5), (7,))
    ours, theirs = weights(*shapes), weights(*shapes)
    phase = PhaseConfig(phase="pretrain", steps=9, optimizer="adafactor", lr=1e-2)
    options: dict[str, Any] = {"scale_parameter": True, "relative_step": False, "weight_decay": 0.0}
    other = Peer(theirs, lr=1e-2, momentum=None, betas=(None, 0.999), eps1=0.0, **options)
    run(build_optimizer(list(zip(("up.weight", "up.bias"), ours, strict=True)), phase), ours, 20)
    run(other, theirs, 20)
    assert_equal(ours, theirs, 1e-6)


@pytest.mark.parametrize("package", ["torch", "timm"])
def test_muon(package: str) -> None:
    shapes = ((6, 8), (8, 4))
    ours, theirs = weights(*shapes), weights(*shapes)
    groups = [{"params": ours, "weight_decay": 0.1}]
    run(MuonAdamW(groups, [], lr=1e-2, momentum=0.95, betas=(0.9, 0.95)), ours, 20)
    options: dict[str, Any] = {"lr": 1e-2, "momentum": 0.95, "weight_decay": 0.1, "nesterov": True}
    if package == "timm":  # whose default are other coefficients of Newton and Schulz, one for each step
        options["ns_coefficients"] = "original"
        reason = "timm is not installed: pip install timm"
        peer_muon = pytest.importorskip("timm.optim", reason=reason, exc_type=ImportError).Muon
    else:
        peer_muon = torch.optim.Muon
    run(peer_muon(theirs, adjust_lr_fn="match_rms_adamw", **options), theirs, 20)
    assert_equal(ours, theirs, 1e-5)


def test_muon_steps_matrices_of_one_shape_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five matrices of one shape, three at once, two of another and its transpose, and one without a gradient."""
    monkeypatch.setattr(muon, "MOST_AT_ONCE", 3 * 48)
    shapes = ((6, 8),) * 5 + ((8, 4), (4, 8))
    ours, theirs = weights(*shapes), weights(*shapes)
    unused = torch.nn.Parameter(torch.ones(6, 8))
    made = muon.BatchedMuon([*ours, unused], lr=1e-2, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    run(made, ours, 20)
    run(torch.optim.Muon(theirs, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"), theirs, 20)
    assert_equal(ours, theirs, 1e-5)
    assert torch.equal(unused, torch.ones(6, 8))
    assert [tuple(state) for state in made.state.values()] == [("momentum_buffer",)] * 7
