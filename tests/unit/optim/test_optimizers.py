"""Every optimiser against its formula in float64, over the phase's groups, and bit for bit from a saved state."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from caramba.config.train import PhaseConfig
from caramba.errors import ConfigError
from caramba.optim import build_optimizer, check_lr_mult

SHAPES = {
    "topology.up.weight": (6, 4),
    "topology.norm.weight": (4,),
    "embedder.token.weight": (5, 4),
    "head.weight": (5, 4),
    "topology.map": (2, 3, 4),
}
STEPS, LR, DECAY = 5, 0.01, 0.1
Rule = Callable[[str, list[Tensor], Tensor, float], Tensor]


def phase_of(optimizer: str, **settings: object) -> PhaseConfig:
    values = {"phase": "pretrain", "steps": 9, "optimizer": optimizer, "lr": LR, "weight_decay": DECAY}
    return PhaseConfig.model_validate(values | settings)


def made(dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, dtype=dtype)) for name, shape in SHAPES.items()}


def gradient(weight: Tensor, step: int) -> Tensor:
    torch.manual_seed(step)
    return torch.randn(weight.shape, dtype=torch.float64).to(weight.dtype) + weight.detach().sin()


def trained(phase: PhaseConfig, steps: int, dtype: torch.dtype, stop: int | None = None) -> dict[str, Tensor]:
    """Weights after `steps`, with new objects made from what was saved after step `stop`."""
    weights = made(dtype)
    optimizer = build_optimizer(weights.items(), phase)
    for step in range(steps):
        if step == stop:
            saved, values = optimizer.state_dict(), {name: value.detach() for name, value in weights.items()}
            rng, weights = torch.get_rng_state(), made(dtype)
            for name, value in weights.items():
                value.data.copy_(values[name])
            optimizer = build_optimizer(weights.items(), phase)
            optimizer.load_state_dict(saved)
            torch.set_rng_state(rng)
        for value in weights.values():
            value.grad = gradient(value, step)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in weights.items()}


def decay_of(name: str) -> float:
    return DECAY if name in ("topology.up.weight", "head.weight", "topology.map") else 0.0


def adamw(name: str, grads: list[Tensor], weight: Tensor, lr: float = LR) -> Tensor:
    """The update from all gradients so far, the decay left out; written as sums and not as running averages."""
    n, beta1, beta2 = len(grads), 0.9, 0.95
    m = sum((1 - beta1) * beta1 ** (n - 1 - k) * g for k, g in enumerate(grads))
    v = sum((1 - beta2) * beta2 ** (n - 1 - k) * g * g for k, g in enumerate(grads))
    return lr * (m / (1 - beta1**n)) / ((v / (1 - beta2**n)).sqrt() + 1e-8)


def adafactor(name: str, grads: list[Tensor], weight: Tensor) -> Tensor:
    n = len(grads)
    rows, columns, whole = 0.0, 0.0, 0.0
    for step, grad in enumerate(grads, 1):
        share = step**-0.8  # 1 - beta2
        rows = rows + share * (grad.pow(2).mean(-1, keepdim=True) - rows)
        columns = columns + share * (grad.pow(2).mean(-2, keepdim=True) - columns) if grad.ndim > 1 else 0.0
        whole = whole + share * (grad.pow(2) - whole)
    epsilon = torch.finfo(torch.float64).eps ** 2
    if grads[0].ndim > 1:
        whole = rows @ columns / rows.mean(-2, keepdim=True)
    update = grads[-1] / whole.clamp_min(epsilon).sqrt()
    rms = update.norm() / math.sqrt(update.numel())
    size = max(1e-3, float(weight.norm()) / math.sqrt(weight.numel()))
    return size * min(LR, 1 / math.sqrt(n)) * update / max(1.0, float(rms))


def test_adamw_and_adafactor_follow_their_formulas_and_decay_by_rule() -> None:
    for optimizer, rule in (("adamw", adamw), ("adafactor", adafactor)):
        found = trained(phase_of(optimizer), STEPS, torch.float64)
        for name, weight in made().items():
            want, grads = weight.detach(), list[Tensor]()
            for step in range(STEPS):
                grads.append(gradient(want, step))
                decayed = want * (1 - LR * decay_of(name))
                want = decayed - rule(name, grads, want)
            torch.testing.assert_close(found[name], want, rtol=1e-12, atol=1e-13, msg=f"{optimizer} {name}")


def test_sgd_follows_its_formula() -> None:
    found = trained(phase_of("sgd", momentum=0.8), STEPS, torch.float64)
    for name, weight in made().items():
        want, velocity = weight.detach(), torch.zeros(weight.shape, dtype=torch.float64)
        for step in range(STEPS):
            velocity = 0.8 * velocity + gradient(want, step) + decay_of(name) * want
            want = want - LR * velocity
        torch.testing.assert_close(found[name], want, rtol=1e-12, atol=1e-13)


def test_muon_levels_the_singular_values_of_the_stacks_matrices_and_adamw_steps_the_rest() -> None:
    phase = phase_of("muon")
    found, start = trained(phase, 1, torch.float64), made()
    name = "topology.up.weight"
    grad = gradient(start[name], 0)
    moved = (start[name].detach() * (1 - LR * DECAY) - found[name]) / (LR * 0.2 * math.sqrt(6))
    u, _, vh = torch.linalg.svd(grad, full_matrices=False)
    levelled = u.T @ moved @ vh.T  # a step along m = 0.05 g has the singular vectors of g
    assert levelled.diag().min() > 0.6
    assert levelled.diag().max() < 1.3
    assert (levelled - levelled.diag().diag()).abs().max() < 0.05, "five steps in bfloat16"
    for other in SHAPES.keys() - {name}:
        want = start[other].detach() * (1 - LR * decay_of(other))
        torch.testing.assert_close(
            found[other], want - adamw(other, [gradient(start[other], 0)], want), rtol=1e-12, atol=1e-13
        )
    sizes = {key: (found[key] - start[key].detach()).square().mean().sqrt() for key in (name, "head.weight")}
    assert 0.1 < sizes[name] / sizes["head.weight"] < 1.0, "steps of both parts are of one size"


def newton_schulz(matrix: Tensor) -> Tensor:
    """U V^T of a wide matrix as Muon's authors write it: five quintic steps in bfloat16."""
    x = matrix.bfloat16()
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x


def test_muon_is_the_published_algorithm_over_many_steps() -> None:
    name = "topology.up.weight"
    found, start = trained(phase_of("muon"), STEPS, torch.float64)[name], made()[name].detach()
    want, momentum, mu = start, torch.zeros_like(start), 0.95
    for step in range(STEPS):
        grad = gradient(want, step)
        momentum = mu * momentum + (1 - mu) * grad
        update = newton_schulz(((1 - mu) * grad + mu * momentum).T).T  # the matrix is tall
        want = want * (1 - LR * DECAY) - LR * 0.2 * math.sqrt(max(want.shape)) * update.double()
    moved = (want - start).norm()
    assert (found - want).norm() < 0.02 * moved, "products in bfloat16 may be taken in another order"


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_step_of_all_weights_is_that_of_each(optimizer: str) -> None:
    fused, single = (
        trained(phase_of(optimizer, fused_optimizer=is_fused), 3, torch.float64) for is_fused in (True, False)
    )
    for name, weight in fused.items():
        torch.testing.assert_close(single[name], weight, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor", "muon"])
def test_a_saved_state_goes_on_bit_equal(optimizer: str) -> None:
    phase = phase_of(optimizer)
    whole, resumed = (trained(phase, 4, torch.float32, stop) for stop in (None, 2))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert not torch.equal(whole["head.weight"], trained(phase, 3, torch.float32)["head.weight"])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"optimizer": "sgd", "lr": "auto"}, "lr=auto uses AdamW's published rates, got optimizer=sgd"),
        (
            {"optimizer": "adafactor", "lr": "auto"},
            "got optimizer=adafactor; give lr, the most that a weight may",
        ),
        (
            {"optimizer": "sgd", "betas": (0.9, 0.99)},
            "betas belongs to optimizer=adamw, lion, muon, swats or pidao_adaptive, got",
        ),
        ({"momentum": 0.5}, "momentum belongs to optimizer=sgd or muon, got optimizer=adamw"),
        ({"lr_scaling": "sqrt"}, "a scaled lr needs the sequences of a step that lr is for"),
        ({"lr_base_batch": 8}, "lr_scaling=none and lr_base_batch=8"),
        (
            {"optimizer": "muon", "fused_optimizer": False},
            "fused_optimizer=false belongs to optimizer=adamw or sgd, got optimizer=muon",
        ),
        ({"optimizer": "swats", "lr_mult": {"*": 2}}, "swats finds one rate for all weights, got lr_mult"),
        ({"phase": "global", "lora": {}, "lr_mult": {"*": 2}}, "lora trains updates alone, whose lr is one"),
        ({"orchestrator_enabled": True, "lr_mult": {"*": 2}}, "sets the rates of strategies, got lr_mult"),
        ({"adagc": {}}, "adagc belongs to gradient_clip_algorithm=adagc, got norm"),
        ({"gradient_clip_algorithm": "value", "max_grad_norm": None}, "clips every element at gradient_clip"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        phase_of(**{"optimizer": "adamw", **settings})


def test_muon_takes_the_automatic_rate_and_a_rate_grows_with_the_batch() -> None:
    assert phase_of("muon", lr="auto").learning_rate_at(2048) == 3e-4
    batch = {"batch_size": 16, "gradient_accumulation_steps": 4, "lr_base_batch": 16}
    assert phase_of("adamw", lr_scaling="linear", **batch).learning_rate_at(64) == 4 * LR
    assert phase_of("adamw", lr_scaling="sqrt", **batch).learning_rate_at(64) == 2 * LR


def test_rates_are_multiples_by_pattern_of_names_and_the_last_match_holds() -> None:
    phase = phase_of("adamw", lr_mult={"topology.*": 10, "*.norm.*": 0, "head.*": 0.5})
    groups = build_optimizer(made().items(), phase).param_groups
    shapes = {(group["lr_mult"], group["weight_decay"]): [tuple(p.shape) for p in group["params"]] for group in groups}
    assert shapes == {
        (0.0, 0.0): [(4,)],
        (0.5, DECAY): [(5, 4)],
        (1.0, 0.0): [(5, 4)],
        (10.0, DECAY): [(6, 4), (2, 3, 4)],
    }


def test_a_pattern_that_matches_no_parameter_is_refused() -> None:
    with pytest.raises(ConfigError, match="got the pattern '\\*gate\\*', expected one that matches a parameter"):
        check_lr_mult(SHAPES, {"head.*": 2, "*gate*": 2})
