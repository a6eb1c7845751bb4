"""bfloat16 weights under float32 masters, of their own or in the moments, and rounded at random."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from caramba.errors import ConfigError
from caramba.ops.adamw import adamw_step, pack_masters, reference_adamw_step
from caramba.ops.stochastic_round import CHUNK, reference_stochastic_round, stochastic_round
from caramba.optim import AdamW, MasterWeights, build_optimizer, master_weights
from tests.unit.optim.test_optimizers import gradient, made, phase_of

MASTERS, RANDOM = {"master_weights": True}, {"stochastic_rounding": True}
IN_MOMENTS = {"master_weights": "in_moments"}
WEIGHTS = {"dtype": "bfloat16", "use_amp": False}


def run(steps: int, stop: int | None = None, **settings: object) -> tuple[MasterWeights, dict[str, Tensor]]:
    """Weights after `steps` of gradients that depend on the step alone; with `stop`, from what was saved after it."""
    optimizer, weights = None, {}
    for step in range(steps):
        if step in (0, stop):
            saved, values = optimizer and optimizer.state_dict(), weights
            rng, weights = torch.get_rng_state(), made(torch.float32)
            for name, value in values.items():
                weights[name].data.copy_(value.detach())
            optimizer = build_optimizer(weights.items(), phase_of(**settings, **WEIGHTS))
            for value in weights.values():
                value.data = value.data.to(torch.bfloat16)
            if saved:
                optimizer.load_state_dict(saved)
            torch.set_rng_state(rng)
        for value in weights.values():
            rng = torch.get_rng_state()
            value.grad = gradient(torch.zeros(value.shape), step).to(torch.bfloat16)
            torch.set_rng_state(rng)
        optimizer.step()
        optimizer.zero_grad()
    assert isinstance(optimizer, MasterWeights)
    return optimizer, {name: value.detach() for name, value in weights.items()}


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "lion", "muon"])
def test_masters_are_the_weights_of_a_run_in_float32(optimizer: str) -> None:
    wide, weights = run(4, optimizer=optimizer, optimizer_offload=optimizer == "adamw", **MASTERS)
    plain = made(torch.float32)
    reference = build_optimizer(plain.items(), phase_of(optimizer))
    for step in range(4):
        for value in plain.values():
            value.grad = gradient(torch.zeros(value.shape), step).to(torch.bfloat16).float()
        reference.step()
    for name, value in plain.items():
        assert weights[name].dtype == torch.bfloat16
        assert torch.equal(weights[name], value.detach().to(torch.bfloat16)), name
    for value, master in zip(plain.values(), wide.state_dict()["masters"], strict=True):
        assert torch.equal(master, value)
    for weight in wide.weights:
        weight.data = weight.data.float()
    wide.restore()
    assert all(torch.equal(weight, value) for weight, value in zip(wide.weights, plain.values(), strict=True))


@pytest.mark.parametrize("settings", [MASTERS, IN_MOMENTS, RANDOM], ids=["masters", "moments", "random"])
def test_a_saved_state_goes_on_bit_equal(settings: dict[str, object]) -> None:
    found = []
    for stop in (None, 2):
        torch.manual_seed(7)
        found.append(run(4, stop, optimizer="adamw", **settings)[1])
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_random_rounding_is_to_a_neighbour_and_right_in_the_mean() -> None:
    torch.manual_seed(0)
    step = 2.0**-7  # of bfloat16 between 1 and 2
    x = torch.tensor([1.0 + 0.3 * step, -1.0 - 0.3 * step, 3.0e-3]).repeat_interleave(40_000)
    out = torch.empty_like(x, dtype=torch.bfloat16)
    stochastic_round([x], [out], torch.tensor(5))
    rounded = out.float()
    assert ((rounded - x).abs() < 2.0**-7 * x.abs()).all(), "less than a step away"
    for part, want in zip(rounded.reshape(3, -1), x.reshape(3, -1), strict=True):
        assert part.unique().numel() == 2
        error = 5 * float(part.std()) / 200  # five standard errors
        assert part.double().mean() == pytest.approx(float(want[0]), abs=error)
    kept = torch.tensor([0.0, -0.0, 1.5, torch.inf, -torch.inf, torch.nan])
    out = torch.empty_like(kept, dtype=torch.bfloat16)
    stochastic_round([kept], [out], torch.tensor(5))
    torch.testing.assert_close(out, kept.bfloat16(), equal_nan=True, rtol=0, atol=0)


def test_updates_below_a_step_of_bfloat16_are_not_lost() -> None:
    torch.manual_seed(0)
    moved = {}
    for name, settings in (("nearest", {}), ("random", RANDOM)):
        weight = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
        phase = phase_of("sgd", momentum=0.0, weight_decay=0.0, **settings, **WEIGHTS)
        optimizer = build_optimizer([("topology.w", weight)], phase.model_copy(update={"lr": 2.0**-11}))
        for _ in range(32):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        moved[name] = 1.0 - float(weight.detach().double().mean())
    assert moved["nearest"] == 0.0
    assert moved["random"] == pytest.approx(32 * 2.0**-11, rel=0.05)


def test_masters_in_the_moments_are_those_of_a_run_in_float32() -> None:
    wide, weights = run(12, optimizer="adamw", **IN_MOMENTS)
    assert not any(master.numel() for master in wide.copies), "no copies stay"
    exact, beside = run(12, optimizer="adamw", **MASTERS)
    for weight in wide.weights:
        weight.data = weight.data.float()
    for _ in range(2):  # what is a master by now stays one
        wide.restore()
    for index, (weight, master) in enumerate(zip(wide.weights, exact.state_dict()["masters"], strict=True)):
        # They begin with weights in bfloat16, masters with float32: 2^-9 apart. Moments are right to 2^-13 a step.
        torch.testing.assert_close(weight.detach(), master, rtol=2.0**-8, atol=1e-4)
        assert torch.equal(weight.detach().bfloat16(), weights[list(beside)[index]])
        assert not torch.equal(weight.detach(), weight.detach().bfloat16().float())


def test_no_update_is_lost_that_the_moments_hold() -> None:
    options: dict[str, Any] = {"lr": 2.0**-14, "weight_decay": 0.0}
    turned = torch.full((40, 3), 1.5).t()  # stepped by way of a copy
    held = [torch.nn.Parameter(x.bfloat16()) for x in (torch.full((1000,), 1.5), turned)]
    exact = torch.nn.Parameter(torch.full((), 1.5))
    named = [(f"w{index}", weight) for index, weight in enumerate(held)]
    wide = MasterWeights(named, lambda copies: AdamW([w for _, w in copies], **options), keeps=False, in_moments=True)
    plain = torch.optim.AdamW([exact], **options)
    for step in range(60):  # of 1/128 of a unit of bfloat16 each
        for weight in held:
            weight.grad = torch.full_like(weight, 1.0 + step % 3)
        exact.grad = torch.tensor(1.0 + step % 3)
        wide.step()
        plain.step()
    assert all((weight == 1.5).all() for weight in held), "less than half a unit away"
    for weight in held:
        weight.data = weight.data.float()
    wide.restore()
    moved = 1.5 - float(exact.detach())
    for weight in held:
        assert weight.unique().numel() == 1
        assert 1.5 - float(weight.detach().flatten()[0]) == pytest.approx(moved, rel=1e-3)


def stepped(weight: Tensor, grad: Tensor, seed: int, **options: Any) -> tuple[Tensor, MasterWeights]:
    """A weight after one step of AdamW that rounds at random."""
    held = torch.nn.Parameter(weight.clone())
    optimizer = MasterWeights([("w", held)], lambda named: AdamW([w for _, w in named], **options), keeps=False)
    held.grad = grad
    torch.manual_seed(seed)
    optimizer.step()
    return held.detach(), optimizer


def test_adamw_steps_bfloat16_weights_to_the_float32_update_in_the_mean() -> None:
    options: dict[str, Any] = {"lr": 3e-4, "weight_decay": 0.1}
    weight = torch.tensor([1.0, -0.7, 3.0e-3]).bfloat16().repeat_interleave(40_000)
    grad = torch.tensor([0.3, 2.0, -1e-3]).bfloat16().repeat_interleave(40_000)
    exact = torch.nn.Parameter(weight.float())
    exact.grad = grad.float()
    torch.optim.AdamW([exact], **options).step()
    found, optimizer = stepped(weight, grad, 1, **options)
    assert not optimizer.copies[0].numel(), "nothing is copied"
    state = optimizer.inner.state[optimizer.copies[0]]
    assert {name: value.dtype for name, value in state.items()} == dict.fromkeys(state, torch.float32)
    for got, want in zip(found.reshape(3, -1), exact.detach().reshape(3, -1), strict=True):
        got = got.float()
        assert got.unique().numel() == 2
        assert ((got - want).abs() < 2.0**-7 * want.abs()).all(), "a neighbour of the update"
        assert got.double().mean() == pytest.approx(float(want[0]), abs=5 * float(got.std()) / 200)
    assert torch.equal(stepped(weight, grad, 1, **options)[0], found), "the seed alone decides"
    assert not torch.equal(stepped(weight, grad, 2, **options)[0], found)
    assert torch.equal(stepped(weight, grad, 1, lr=0.0)[0], weight), "what bfloat16 holds stays"
    # Of another layout, stepped by way of a copy.
    turned = weight[:120].view(3, 40).t()
    assert ((stepped(turned, grad[:120].view(3, 40).t(), 1, **options)[0] - turned).abs() < 2.0**-7).all()


@pytest.mark.parametrize("optimizer", ["sgd", "adafactor", "lion", "muon"])
def test_copies_of_a_part_at_a_time_step_as_copies_of_all(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> tuple[int, dict[str, Tensor]]:
        torch.manual_seed(3)
        made, weights = run(3, optimizer=optimizer, **RANDOM)
        for weight in made.weights:
            weight.grad = torch.zeros_like(weight)
        return len(list(made._parts())), weights

    n_parts, whole = trained()
    assert n_parts == 1
    monkeypatch.setattr(master_weights, "LEAST", 0)
    n_parts, parts = trained()
    assert n_parts == 4, "the largest matrix stands alone beside parts of at most its size"
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


class Largest(TorchDispatchMode):
    """The bytes of the largest memory that an operation makes."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given:
                self.found = max(self.found, x.untyped_storage().nbytes())
        return result


def test_the_references_need_memory_for_a_part_of_a_tensor_alone() -> None:
    count = 3 * CHUNK + 5
    moments, step = [torch.zeros(count) for _ in range(2)], torch.zeros(())
    weight, seed = torch.ones(count, dtype=torch.bfloat16), torch.tensor(1)
    first, second = moments
    rest = (0.1, 0.9, 0.999, 1e-8, 0.1, False, None, None, None, None, seed, 0)
    with Largest() as seen:
        reference_adamw_step([weight], [first], [second], [step], [weight], [], *rest)
        reference_stochastic_round(moments[:1], [weight], seed, 0)
    assert 4 * CHUNK <= seen.found <= 8 * CHUNK, "float32 values, and the random words of eight bytes"


def test_masters_come_out_of_the_moments_a_part_at_a_time() -> None:
    count = 3 * CHUNK + 5
    x, m = torch.randn(2, count)
    weight, first, second = pack_masters(x, m, m.square())
    held = weight.float()
    with Largest() as seen:
        master_weights.restore_masters_(held, first, second)
    assert torch.equal(held, x)
    assert 0 < seen.found <= 4 * CHUNK


def test_what_has_no_place_in_the_moments_is_refused() -> None:
    x, narrow, t = torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16), torch.zeros(())
    text = r"expected bfloat16 parameters with float32 moments"
    for given in ([x], [x], [x]), ([narrow], [narrow], [narrow]):
        with pytest.raises(ConfigError, match=text):
            adamw_step(*given, [t], [narrow], lr=0.1, in_moments=True)
    with pytest.raises(ConfigError, match=rf"0 weights and a seed; {text}"):
        adamw_step([narrow], [x], [x], [t], [narrow], lr=0.1, in_moments=True, seed=torch.tensor(1))


def test_what_is_not_rounded_at_random_is_refused() -> None:
    x, half, seed = torch.zeros(3), torch.zeros(3, dtype=torch.float16), torch.tensor(1)
    t = torch.zeros(())
    with pytest.raises(ConfigError, match=r"parameters of torch.float16 with 0 weights, and a seed; expected bfloat16"):
        adamw_step([half], [x], [x], [t], [half], lr=0.1, seed=seed)
    with pytest.raises(ConfigError, match=r"stochastic_round: tensor 0 is \(3,\) of torch.float32 .* torch.float16"):
        stochastic_round([x], [half], seed)
    with pytest.raises(ConfigError, match=r"seed is \(\) of torch.float32 on cpu; expected one int64"):
        stochastic_round([x], [half.bfloat16()], t)
