"""The optimiser AdamW over its kernel beside torch's own fused one: weights, states, masters, a GradScaler's values.

On a GPU; without one in Triton's interpreter, by `tests/ops/test_in_the_interpreter.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from caramba import kernels
from caramba.errors import ConfigError
from caramba.ops import backend
from caramba.ops.adamw import adamw_step
from caramba.ops.backend import without_kernels
from caramba.ops.stochastic_round import stochastic_round
from caramba.optim import AdamW, MasterWeights, clip_gradients, clipping_step
from caramba.optim.adamw import can_step
from caramba.train.throughput import StepNorms
from tests.unit.ops.kernel_device import DEVICE, HAS_GPU, RUNS_KERNELS
from tests.unit.optim.test_optimizers import gradient, made

pytestmark = RUNS_KERNELS
NARROW = torch.bfloat16 if HAS_GPU else torch.float16
OPTIONS = {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.1}


@pytest.fixture(autouse=True, scope="module")
def attached() -> None:
    if HAS_GPU:
        kernels.load("cuda")
    elif backend.implementation("adamw_step", "cpu") != "triton":
        launcher = importlib.import_module("caramba.kernels.triton.adamw").adamw_step
        backend.attach("adamw_step", "cpu", "triton", launcher)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each call of the op has stepped."""
    counts: list[int] = []

    def counted(parameters: list[Tensor], *rest: object, **options: object) -> None:
        counts.append(len(parameters))
        adamw_step(parameters, *rest, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(importlib.import_module("caramba.optim.adamw"), "adamw_step", counted)
    return counts


def weights(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(w.detach().to(DEVICE, dtype)) for w in made(torch.float32).values()]


def groups(parameters: list[torch.nn.Parameter]) -> list[dict[str, object]]:
    return [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.0}]


def give_gradients(parameters: list[torch.nn.Parameter], step: int, scale: float = 1.0) -> None:
    for p in parameters[:-1]:  # the last one never has any
        # In the parameter's own strides, as autograd makes it and torch's kernel for CUDA asks for.
        p.grad = torch.empty_like(p).copy_(scale * gradient(torch.zeros(p.shape), step))


def test_steps_and_states_are_torchs_and_each_goes_on_from_the_others(taken: list[int]) -> None:
    ours, theirs = weights(), weights()
    mine: torch.optim.Optimizer = AdamW(groups(ours), **OPTIONS)
    its: torch.optim.Optimizer = torch.optim.AdamW(groups(theirs), fused=True, **OPTIONS)
    for step in range(6):
        if step == 3:  # states change sides
            saved = mine.state_dict(), its.state_dict()
            assert saved[0]["param_groups"] == saved[1]["param_groups"]
            mine, its = (
                AdamW(groups(ours), **OPTIONS),
                torch.optim.AdamW(groups(theirs), fused=True, **OPTIONS),
            )
            mine.load_state_dict(saved[1])
            its.load_state_dict(saved[0])
        rate = torch.tensor(0.02 / (step + 1), device=DEVICE) if step == 4 else 0.02 / (step + 1)
        scaled = {"grad_scale": torch.tensor(8.0), "found_inf": torch.tensor(float(step == 5))} if step > 3 else {}
        for optimizer, parameters in ((mine, ours), (its, theirs)):
            for group in optimizer.param_groups:
                group["lr"] = rate
            for name, value in scaled.items():
                setattr(optimizer, name, value.to(DEVICE))
            give_gradients(parameters, step, 8.0 if scaled else 1.0)
            optimizer.step()
        for x, y in zip(ours, theirs, strict=True):
            torch.testing.assert_close(x, y, rtol=4e-6, atol=4e-6)
    assert taken == [2, 2] * 6
    for x, y in zip(ours, theirs, strict=True):
        assert mine.state[x].keys() == its.state[y].keys()
        for name, value in mine.state[x].items():
            torch.testing.assert_close(value, its.state[y][name], rtol=2e-6, atol=2e-6)
    assert float(mine.state[ours[0]]["step"]) == 5.0, "what is not finite is not counted"


def test_masters_take_one_pass_with_the_bits_of_copies(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(is_one_pass: bool) -> tuple[MasterWeights, list[torch.nn.Parameter]]:
        held = weights()
        named = [(f"topology.{index}", w) for index, w in enumerate(held)]
        wide = MasterWeights(named, lambda copies: AdamW([w for _, w in copies], **OPTIONS), keeps=True)
        for w in held:
            w.data = w.data.to(NARROW)
        with monkeypatch.context() as patch:
            if not is_one_pass:
                patch.setattr(AdamW, "takes", lambda *_: False)
            for step in range(3):
                give_gradients(held, step)
                wide.step()
                assert all(p.grad is None for p in wide.copies)
        return wide, held

    (wide, held), (copied, by_copies) = run(True), run(False)
    for x, y in zip((*held, *wide.copies), (*by_copies, *copied.copies), strict=True):
        if HAS_GPU:  # whose compiler may fuse products and sums of two kernels in two ways
            torch.testing.assert_close(x, y, rtol=1e-2 if x.dtype == NARROW else 1e-6, atol=1e-6)
        else:
            assert torch.equal(x, y)
    assert all(torch.equal(w, p.to(NARROW)) for w, p in zip(held, wide.copies, strict=True))
    assert len(wide.state_dict()["inner"]["state"]) == len(held) - 1
    assert len(taken) == 6


def test_a_clip_is_left_to_one_step_and_seen_by_the_norms(taken: list[int]) -> None:
    found = []
    for is_handed_over in (True, False):
        held = weights()
        named = [(f"topology.{index}.weight", w) for index, w in enumerate(held)]
        optimizer = AdamW(held, **OPTIONS)
        norms = StepNorms(named, is_due=lambda: True, has_room=lambda _: True)
        norms.attach(optimizer)
        seen = []
        for step in range(2):
            give_gradients(held, step)
            gradients = [w.grad.clone() for w in held if w.grad is not None]
            taker = clipping_step(optimizer)
            assert taker is optimizer
            # Far below the norm, then above it.
            limit = 0.5 if step == 0 else 1e6
            total = clip_gradients([held], limit, hand_over=taker.take_clip if is_handed_over else None)
            stays = [torch.equal(w.grad, x) for w, x in zip(held, gradients, strict=False) if w.grad is not None]
            assert all(stays) == (is_handed_over or step == 1)
            optimizer.step()
            assert optimizer.clip is None
            seen += [total, *norms.read().values()]
        found.append((torch.tensor(seen), [w.detach() for w in held]))
    (handed, ours), (scaled, theirs) = found
    torch.testing.assert_close(handed, scaled, rtol=1e-6, atol=0)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)
    assert len(taken) == 4
    masters = MasterWeights(
        [("topology.w", w) for w in weights()], lambda named: AdamW(w for _, w in named), keeps=True
    )
    assert clipping_step(masters) is masters.inner
    assert clipping_step(torch.optim.AdamW(weights())) is None


def test_what_has_no_kernel_is_torchs_and_amsgrad_is_refused(taken: list[int]) -> None:
    wide = [torch.nn.Parameter(w.detach().double()) for w in weights()]
    turned = [torch.nn.Parameter(w.detach().t()) for w in weights() if w.ndim == 2]
    for parameters in (wide, turned):
        theirs = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
        optimizers = [AdamW(parameters, **OPTIONS), torch.optim.AdamW(theirs, fused=True, **OPTIONS)]
        for optimizer, own in zip(optimizers, (parameters, theirs), strict=True):
            give_gradients(own, 1)
            optimizer.step()
        assert all(torch.equal(x, y) for x, y in zip(parameters, theirs, strict=True))
    assert not taken
    with pytest.raises(ConfigError, match="adamw: amsgrad=True, expected False"):
        AdamW(wide, amsgrad=True)
    x = torch.zeros(3, device=DEVICE)
    with pytest.raises(ConfigError, match=r"adamw_step: step 0 is \(3,\) of torch.float32"):
        adamw_step([x], [x], [x], [x], [x], lr=0.1)
    with pytest.raises(ConfigError, match=r"gradient 0 is torch.float32 of shape \(1, 3\)"):
        adamw_step([x], [x], [x], [x], [x[None]], lr=0.1)
    assert can_step(wide[0].float(), wide[0].float())


def rounding(named: list[tuple[str, torch.nn.Parameter]]) -> MasterWeights:
    """AdamW over weights of bfloat16 from here on, rounded at random."""
    wide = MasterWeights(named, lambda copies: AdamW([w for _, w in copies], **OPTIONS), keeps=False)
    for _, w in named:
        w.data = w.data.bfloat16()
    return wide


def test_weights_rounded_at_random_are_those_of_copies_and_take_a_clip(taken: list[int]) -> None:
    def run(*without: str) -> list[torch.nn.Parameter]:
        held = weights()
        wide = rounding([(f"topology.{index}", w) for index, w in enumerate(held)])
        with without_kernels(*without) if without else nullcontext():
            for step in range(3):
                give_gradients(held, step)
                taker = clipping_step(wide)
                assert (taker is None) == bool(without)
                # The limit is a power of two and far away, so that narrow gradients are scaled exactly too.
                clip = torch.tensor(0.25, device=DEVICE)
                if taker is None:
                    torch._foreach_mul_([w.grad for w in held if w.grad is not None], 0.25)
                else:
                    taker.take_clip(clip)
                torch.manual_seed(step)
                wide.step()
                assert not any(p.numel() for p in wide.copies)
                assert wide.inner.clip is None  # pyright: ignore[reportAttributeAccessIssue]
        return held

    for x, y in zip(run(), run("adamw_step"), strict=True):
        # torch's float32 update may differ in its last bit, which decides one rounding in many thousands.
        assert int((x != y).sum()) <= 2
        torch.testing.assert_close(x, y, rtol=2.0**-6, atol=1e-6)
    assert taken == [4] * 3


@pytest.mark.parametrize("way", ["kernel", "reference", "captured"])
def test_masters_in_the_moments_are_masters_and_take_a_clip(
    way: str, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "captured":  # into a CUDA graph, whose kernels may not look addresses up
        monkeypatch.setattr(importlib.import_module("caramba.optim.adamw"), "is_capturing", lambda p: True)

    def run(in_moments: bool) -> list[torch.nn.Parameter]:
        held = weights()
        for w in held:  # what bfloat16 has, so that both begin alike
            w.data = w.data.bfloat16().float()
        named = [(f"topology.{index}", w) for index, w in enumerate(held)]
        wide = MasterWeights(
            named,
            lambda copies: AdamW([w for _, w in copies], **OPTIONS),
            keeps=not in_moments,
            in_moments=in_moments,
        )
        for w in held:
            w.data = w.data.bfloat16()
        for step in range(4):
            give_gradients(held, step)
            if in_moments and way == "kernel":
                taker = clipping_step(wide)
                assert taker is wide.inner
                taker.take_clip(torch.tensor(0.25, device=DEVICE))
            else:
                torch._foreach_mul_([w.grad for w in held if w.grad is not None], 0.25)
            wide.step()
            assert wide.inner.clip is None  # pyright: ignore[reportAttributeAccessIssue]
        for w in held:
            w.data = w.data.float()
        wide.restore()
        return held

    with without_kernels("adamw_step"):
        exact = run(False)
    assert not taken
    with without_kernels("adamw_step") if way == "reference" else nullcontext():
        found = run(True)
    assert taken == ([] if way == "captured" else [4] * 4)
    for x, y in zip(found, exact, strict=True):
        # Of 4 steps of 0.01: the first moment is right to 2^-13 each time.
        torch.testing.assert_close(x, y, rtol=1e-6, atol=4 * 0.01 * 2.0**-11)


def test_without_kernels_what_is_rounded_at_random_is_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = ("adamw_step", "stochastic_round")
    if not HAS_GPU and backend.implementation(ops[1], DEVICE) != "triton":
        launcher = importlib.import_module("caramba.kernels.triton.stochastic_round").stochastic_round
        backend.attach(ops[1], DEVICE, "triton", launcher)
    seen: list[str] = []
    names = (("adamw", "reference_adamw_step"), ("stochastic_round", "reference_stochastic_round"))
    for op, (name, function) in zip(ops, names, strict=True):
        module = importlib.import_module(f"caramba.ops.{name}")
        reference = getattr(module, function)

        def counted(*given: object, op: str = op, reference: Callable[..., None] = reference) -> None:
            seen.append(op)
            assert not torch.is_grad_enabled()
            reference(*given)

        monkeypatch.setattr(module, function, counted)
    x, seed = torch.full((9,), 0.3, device=DEVICE), torch.tensor(3, device=DEVICE)

    def run() -> list[Tensor]:
        weight, out, t = (x.bfloat16(), torch.empty_like(x, dtype=torch.bfloat16), torch.zeros_like(x[0]))
        adamw_step([weight], [x.clone()], [x.clone()], [t], [x], lr=0.0, seed=seed)
        stochastic_round([x], [out], seed)
        return [weight, out]

    by_kernel = run()
    assert not seen
    with without_kernels():
        by_reference = run()
    assert seen == [*ops]
    assert all(torch.equal(a, b) for a, b in zip(by_kernel, by_reference, strict=True))


@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_rounding_at_random_takes_twelve_bytes_a_parameter_and_waits_for_nothing() -> None:
    began = torch.cuda.memory_allocated()
    shapes = [(8192, 2048), *[(2048, 2048)] * 8]
    held = [torch.nn.Parameter(torch.zeros(shape, device=DEVICE)) for shape in shapes]
    wide = rounding([(f"topology.{index}", w) for index, w in enumerate(held)])
    for w in held:
        w.grad = torch.ones_like(w)
    wide.step()  # makes the states and the table of addresses
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        wide.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    parameters = sum(w.numel() for w in held)
    assert torch.cuda.max_memory_allocated() - began < 12.5 * parameters


@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_a_captured_step_is_torchs() -> None:
    ours, eager = weights(), weights()
    optimizers = [AdamW(ours, **OPTIONS), AdamW(eager, **OPTIONS)]
    for optimizer, own in zip(optimizers, (ours, eager), strict=True):
        give_gradients(own, 0)
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[0].step()
    for _ in range(2):
        graph.replay()
        optimizers[1].step()
    for x, y in zip(ours, eager, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_captured_steps_round_at_random_each_time_anew() -> None:
    weight = torch.nn.Parameter(torch.ones(200_000, device=DEVICE))
    wide = rounding([("topology.w", weight)])
    weight.grad = torch.ones_like(weight)
    wide.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wide.step()
    found = []
    for _ in range(3):
        before = weight.detach().clone()
        graph.replay()
        found.append((weight.detach() - before).double())
    # A step is lr (1 + decay w) long, to one or two neighbours of each weight.
    means = [float(moved.mean()) for moved in found]
    assert means == pytest.approx([-0.011] * 3, rel=0.01)
    assert not torch.equal(found[0], found[1])
