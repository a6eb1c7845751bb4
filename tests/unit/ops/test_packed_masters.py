"""The bits of float32 weights that their moments keep: nothing of a weight is lost, and little of a moment."""

from __future__ import annotations

import pytest
import torch

from caramba.ops.adamw import moments_of, pack_masters, unpack_masters

SPECIAL = (0.0, -0.0, 1.0, -1.5, 3.4e38, -3.4e38, 1e-40, -1e-45, torch.inf, -torch.inf)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def test_every_float32_comes_back_from_the_nearest_bfloat16_and_two_moments() -> None:
    draws = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (200_000,), generator=draws).int()
    halves = torch.arange(0x3F80_0000, 0x3F90_0000, 0x8000, dtype=torch.int32)  # bfloat16 and ties between two
    x = torch.cat((patterns.view(torch.float32), halves.view(torch.float32), torch.tensor(SPECIAL)))
    x = x[~x.isnan()]
    m = torch.randn(x.shape, generator=draws) * 1e-3
    m[::7] = 0.0
    weight, first, second = pack_masters(x, m, m.square())
    assert weight.dtype == torch.bfloat16
    found = unpack_masters(weight, first, second)
    assert torch.equal(bits(found), bits(x))
    assert torch.equal(bits(unpack_masters(found, first, second)), bits(x)), "of a master as of its weight"
    tied = (bits(x) & 0xFFFF) == 0x8000
    assert int(tied.sum()) > 10
    assert torch.equal(weight[~tied], x[~tied].bfloat16())
    assert (weight[tied].float().abs() > x[tied].abs()).all(), "halves go away from zero"


def test_moments_lose_half_a_unit_of_what_they_keep() -> None:
    draws = torch.Generator().manual_seed(1)
    x, m = torch.randn(2, 100_000, generator=draws)
    v = m.square() + 1e-12
    _, first, second = pack_masters(x, m, v)
    for held, want, unit in zip(moments_of(first, second), (m, v), (-13, -19), strict=True):
        assert float(((held - want) / want).abs().max()) <= 2.0**unit
        assert float(((held - want) / want).abs().max()) > 2.0 ** (unit - 1)
    for held, want, unit in ((first, m, -12), (second, v, -18)):  # as they lie
        assert float(((held - want) / want).abs().max()) < 2.0 ** (unit + 0.6)


def test_new_moments_keep_nothing_and_nan_stays() -> None:
    weight, zero = torch.tensor([1.5, -2.0, 0.0]).bfloat16(), torch.zeros(3)
    assert torch.equal(unpack_masters(weight, zero, zero), weight.float())
    broken = torch.tensor([torch.nan, 1.0, 1.0])
    for at in range(3):
        given = [broken if index == at else torch.ones(3) for index in range(3)]
        held = pack_masters(*given)
        found = (unpack_masters(*held), *moments_of(*held[1:]))
        assert [bool(x.isnan().any()) for x in found] == [index == at for index in range(3)]
    all_ones = torch.tensor([0x7FFF_FFFF], dtype=torch.int32).view(torch.float32)  # what a GPU's arithmetic makes
    held = pack_masters(all_ones, all_ones, all_ones)
    assert all(x.isnan().all() for x in (held[0], unpack_masters(*held), *moments_of(*held[1:])))


@pytest.mark.parametrize("beta", [0.9, 0.95, 0.99])
def test_a_mean_of_gradients_is_that_in_float32(beta: float) -> None:
    draws = torch.Generator().manual_seed(2)
    m = exact = torch.zeros(1000)
    v = exact_v = torch.zeros(1000)
    weight = torch.ones(1000).bfloat16()
    for _ in range(300):
        grad = torch.randn(1000, generator=draws) + 0.5
        wide = unpack_masters(weight, m, v)
        m, v = moments_of(m, v)
        exact, exact_v = exact + (1 - beta) * (grad - exact), exact_v + 0.001 * (grad.square() - exact_v)
        weight, m, v = pack_masters(wide * 0.999, m + (1 - beta) * (grad - m), v + 0.001 * (grad.square() - v))
    m, v = moments_of(m, v)
    assert float((m - exact).abs().max()) < 2e-3 * float(exact.abs().mean())
    assert float(((v - exact_v) / exact_v).abs().max()) < 1e-3
