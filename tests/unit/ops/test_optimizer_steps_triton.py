"""The Triton kernels of Lion, AdamW, rounding at random and norms of many tensors against their references.

On a GPU in all dtypes and at large sizes; without one in Triton's interpreter, by `tests/ops/test_units_in_the_interpreter.py`.
Everything that is allocated and not written is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from caramba.ops.adamw import adamw_step, moments_of, pack_masters, reference_adamw_step, unpack_masters
from caramba.ops.foreach_norm import foreach_norm
from caramba.ops.lion import lion_step, reference_lion_step
from caramba.ops.stochastic_round import reference_stochastic_round, stochastic_round
from tests.unit.ops.kernel_device import DEVICE, HAS_GPU, RUNS_KERNELS, attached_kernels

pytestmark = RUNS_KERNELS
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if HAS_GPU else [])]


@pytest.fixture(autouse=True, scope="module")
def attached() -> Iterator[None]:
    yield from attached_kernels("lion", "adamw", "stochastic_round", "foreach_norm")


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x.to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_lion_gives_the_references_bits(dtype: torch.dtype) -> None:
    sizes = [(3, 5), (4096,), (0,), (70, 130), (1,), *([(3000, 1111), (2**24,)] if HAS_GPU else [])]
    made = [
        [drawn(*size, seed=3 * at + kind, dtype=one) for at, size in enumerate(sizes)]
        for kind, one in enumerate((dtype, torch.float32, dtype))
    ]
    made[0].append(drawn(9, seed=90)[1:])  # not at an aligned address
    made[1].append(drawn(8, seed=91))
    made[2].append(drawn(8, seed=92))
    expected = [[x.clone() for x in tensors] for tensors in made]
    for step in range(3):
        rate = 0.01 / (step + 1)
        lion_step(*made, lr=rate, beta1=0.9, beta2=0.98, weight_decay=0.1)
        reference_lion_step(*expected, rate, 0.9, 0.98, 0.1)
    for ours, want in zip(made, expected, strict=True):
        for x, y in zip(ours, want, strict=True):
            assert torch.equal(x, y)


def test_lion_shows_a_gradient_that_is_no_number() -> None:
    """A sign that NaN does not reach would leave the weight a number while its momentum is lost for good."""
    made = [drawn(size, seed=seed) for seed, size in enumerate((4100, 4100, 4100))]
    made[2][5], made[2][4099], made[1][7] = torch.nan, torch.nan, torch.nan
    made[2][6] = torch.inf
    expected = [x.clone() for x in made]
    lion_step(*([x] for x in made), lr=0.1, weight_decay=0.1)
    reference_lion_step(*([x] for x in expected), 0.1, 0.9, 0.99, 0.1)
    assert made[0].isnan().nonzero().flatten().tolist() == [5, 7, 4099]
    for x, y in zip(made, expected, strict=True):
        assert torch.equal(x.nan_to_num(), y.nan_to_num())
        assert torch.equal(x.isnan(), y.isnan())


def states_of(dtype: torch.dtype, masters: bool) -> list[list[Tensor]]:
    """Parameters, moments, gradients, steps and, for masters, weights: some empty, some at unaligned addresses."""
    sizes = [(3, 5), (4096,), (0,), (70, 33), (1,), *([(3000, 1111), (2**24,)] if HAS_GPU else [])]
    wide = torch.float32 if masters else dtype
    made = [
        [drawn(*size, seed=5 * at + kind, dtype=one) for at, size in enumerate(sizes)]
        for kind, one in enumerate((wide, wide, wide, dtype))
    ]
    made = [[*xs, drawn(9, seed=90 + kind, dtype=xs[0].dtype)[1:]] for kind, xs in enumerate(made)]
    made[2] = [x.square() for x in made[2]]
    made.append([torch.full((), float(at % 3), device=DEVICE) for at in range(len(made[0]))])
    made.append([x.to(dtype) for x in made[0]] if masters else [])
    return made


@pytest.mark.parametrize("masters", [False, True], ids=["weights", "masters"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_adamw_is_its_reference_in_float64_within_a_rounding(dtype: torch.dtype, masters: bool) -> None:
    p, m, v, g, t, w = states_of(dtype, masters)
    given: dict[str, Any] = {
        name: torch.tensor(value, device=DEVICE) for name, value in (("lr", 0.01), ("clip", 0.5), ("grad_scale", 4.0))
    }
    for step in range(3):
        # From the same bits at every step, so that what one rounds is not an error of the next.
        wide = [[x.double() for x in xs] for xs in (p, m, v)]
        counts = [x.clone() for x in t]
        found = torch.tensor([float(step == 1)], device=DEVICE)
        options = given if step else {"lr": 0.01}
        before = [[x.clone() for x in xs] for xs in (p, m, v, t, w)]
        adamw_step(p, m, v, t, g, weights=w, weight_decay=0.1, maximize=step == 2, found_inf=found, **options)
        if step == 1:  # left out
            for xs, ys in zip((p, m, v, t, w), before, strict=True):
                assert all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))
            continue
        reference_adamw_step(
            *(*wide, counts, [x.double() for x in g], [], 0.01, 0.9, 0.999, 1e-8, 0.1, step == 2),
            *(None, options.get("clip"), options.get("grad_scale"), None),
        )
        assert all(torch.equal(x, y) for x, y in zip(t, counts, strict=True))
        unit = max(torch.finfo(p[0].dtype).eps, 2e-6)
        for xs, ys in zip((p, m, v), wide, strict=True):
            for x, y in zip(xs, ys, strict=True):
                torch.testing.assert_close(x.double(), y, rtol=unit, atol=4e-6)
        assert all(torch.equal(x, y.to(x.dtype)) for x, y in zip(w, p, strict=False)), "weights are masters rounded"


@pytest.mark.parametrize("is_aligned", [True, False])
def test_rounding_at_random_gives_the_references_bits(is_aligned: bool) -> None:
    # One tensor at an unaligned address has all of them read a value at a time.
    wide, *_, t, w = (xs[: -1 if is_aligned else None] for xs in states_of(torch.bfloat16, masters=True))
    seed = torch.randint(2**62, (), generator=torch.Generator().manual_seed(5)).to(DEVICE)
    outs, want = ([torch.empty_like(x) for x in w] for _ in range(2))
    wide[1][:4] = torch.tensor([torch.inf, -torch.inf, -0.0, 3.4e38])
    stochastic_round(wide, outs, seed, first=7)
    reference_stochastic_round(wide, want, seed, 7)
    assert all(torch.equal(x, y) for x, y in zip(outs, want, strict=True))
    wide[1][0] = torch.nan
    stochastic_round(wide, outs, seed)
    assert outs[1].isnan().nonzero().tolist() == [[0]]
    assert not torch.equal(outs[3], want[3]), "another number, other bits"
    # Products of so few bits that both compute them exactly: without gradients the weights decay by 2^-15.
    ours, theirs = ([x.clone() for x in w] for _ in range(2))
    nothing = [[torch.zeros_like(x, dtype=torch.float32) for x in w] for _ in range(3)]
    adamw_step(ours, *nothing[:2], t, nothing[2], lr=0.5, weight_decay=2.0**-14, seed=seed, first=2)
    rest = (0.5, 0.9, 0.999, 1e-8, 2.0**-14, False, None, None, None, None, seed, 2)
    reference_adamw_step(theirs, *nothing[:2], [x.clone() for x in t], nothing[2], [], *rest)
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
    assert any(not torch.equal(x, y) for x, y in zip(ours, w, strict=True))


@pytest.mark.parametrize("left_out", [False, True])
def test_adamw_rounds_the_float32_update_to_a_neighbour(left_out: bool) -> None:
    _, m, v, g, t, w = (xs[:-1] for xs in states_of(torch.bfloat16, masters=True))  # aligned
    wide = [[x.double() for x in xs] for xs in (w, m, v)]
    before = [[x.clone() for x in xs] for xs in (w, m, v, t)]
    given: dict[str, Any] = {
        name: torch.tensor(value, device=DEVICE)
        for name, value in (("clip", 0.5), ("grad_scale", 4.0), ("found_inf", float(left_out)))
    }
    adamw_step(w, m, v, t, g, lr=0.01, weight_decay=0.1, seed=torch.tensor(9, device=DEVICE), **given)
    if left_out:
        for xs, ys in zip((w, m, v, t), before, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))
        return
    reference_adamw_step(
        *(*wide, before[3], [x.double() for x in g], [], 0.01, 0.9, 0.999, 1e-8, 0.1, False, None),
        *(given["clip"], given["grad_scale"], None),
    )
    for xs, ys in zip((m, v), wide[1:], strict=True):
        for x, y in zip(xs, ys, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=2e-6, atol=4e-6)
    for x, y in zip(w, wide[0], strict=True):
        assert ((x.double() - y).abs() <= 2.0**-7 * y.abs() + 4e-6).all()


@pytest.mark.parametrize("is_aligned", [True, False])
def test_adamw_steps_masters_in_the_moments_as_its_reference(is_aligned: bool) -> None:
    wide, m, v, g, t, _ = (xs[: -1 if is_aligned else None] for xs in states_of(torch.bfloat16, masters=True))
    made = [pack_masters(*one) for one in zip(wide, m, v, strict=True)]
    ours = [[x.clone() for x in xs] for xs in zip(*made, strict=True)]
    counts = [x.clone() for x in t]
    given = [torch.tensor(value, device=DEVICE) for value in (0.01, 0.5, 4.0)]
    for step in range(3):
        found = torch.tensor(float(step == 1), device=DEVICE)
        named = dict(zip(("lr", "clip", "grad_scale"), given, strict=True), found_inf=found)
        # From the same bits at every step: a moment that was rounded to the other side would move the next update by
        # 2^-12 of it, and updates are of any size where second moments are near zero.
        before, theirs = ([[x.clone() for x in xs] for xs in ours] for _ in range(2))
        adamw_step(*ours, t, g, weight_decay=0.1, in_moments=True, **named)
        rest = (0.0, 0.9, 0.999, 1e-8, 0.1, False, *given, found)
        reference_adamw_step(*theirs, counts, g, [], *rest, in_moments=True)
        assert all(torch.equal(x, y) for x, y in zip(t, counts, strict=True))
        if step == 1:  # left out, with all that stands in the last bits
            for xs, ys in zip(ours, before, strict=True):
                assert all(torch.equal(bits_of(x), bits_of(y)) for x, y in zip(xs, ys, strict=True))
        pairs = zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True)
        for mine, its in pairs:
            # A moment may round to the other side of what it keeps: 2^-12 of the first, 2^-18 of the second.
            torch.testing.assert_close(unpack_masters(*mine), unpack_masters(*its), rtol=1e-5, atol=1e-5)
            for x, y, unit in zip(moments_of(*mine[1:]), moments_of(*its[1:]), (-11, -17), strict=True):
                torch.testing.assert_close(x, y, rtol=2.0**unit, atol=1e-6)
            # Halves go away from zero here and to even in `bfloat16()`: nothing else may differ.
            masters = unpack_masters(*mine)
            nearest = masters.bfloat16()
            is_other = nearest != mine[0]
            assert (bits_of(masters)[is_other] & 0xFFFF == 0x8000).all()
            assert (mine[0][is_other].abs() > nearest[is_other].abs()).all()
    assert any(not torch.equal(x, y[0]) for x, y in zip(ours[0], made, strict=True))
    nothing = [torch.zeros_like(x) for x in g]
    kept = [unpack_masters(*one) for one in zip(*ours, strict=True)]
    adamw_step(*ours, t, nothing, lr=0.0, in_moments=True)
    assert all(torch.equal(unpack_masters(*one), x) for one, x in zip(zip(*ours, strict=True), kept, strict=True))
    ours[1][1][0] = torch.nan
    adamw_step(*ours, t, nothing, lr=0.1, in_moments=True)
    for xs in (ours[0], ours[1]):
        assert xs[1].isnan().nonzero().tolist() == [[0]]


def bits_of(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_many_tensors_are_those_in_float64(dtype: torch.dtype) -> None:
    sizes = [(3, 5), (33000,), (0,), (70, 33), *([(3000, 1111), (2**25 + 3,)] if HAS_GPU else [])]
    tensors = [drawn(*size, seed=at, dtype=dtype) for at, size in enumerate(sizes)]
    mixed = [tensors[0], tensors[1].float(), *tensors[1:], drawn(9, seed=9, dtype=dtype)[1:]]
    for listed in (tensors, mixed):
        want = torch.stack([torch.linalg.vector_norm(x.double()) for x in listed])
        found = foreach_norm(listed)
        torch.testing.assert_close(found.double(), want, rtol=2e-6, atol=0)
        assert torch.equal(found, foreach_norm(listed)), "the same additions every time"
    assert foreach_norm([torch.full((3,), torch.inf, device=DEVICE), tensors[0]])[0] == torch.inf
    wide = foreach_norm([tensors[0], tensors[1].double()])  # which the kernel does not take
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide[1], torch.linalg.vector_norm(tensors[1].double()), rtol=1e-12, atol=0)
