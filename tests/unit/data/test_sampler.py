from __future__ import annotations

from itertools import chain, islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from caramba.data import TokenDataset, WindowSampler, epoch_permutation
from caramba.errors import DataError
from tests.examples import examples


def take(sampler: WindowSampler, batches: int) -> list[int]:
    return list(chain.from_iterable(islice(sampler, batches)))


def test_every_window_once_per_epoch_in_another_order_each() -> None:
    stream = take(WindowSampler(30, 5, seed=3), 18)
    epochs = [stream[i : i + 30] for i in range(0, 90, 30)]
    assert all(sorted(epoch) == list(range(30)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert take(WindowSampler(30, 5, seed=4), 6) != epochs[0]


def test_the_order_is_the_same_on_every_machine() -> None:
    """A committed order: a change of it would replay or skip data in every run that is resumed."""
    assert epoch_permutation(8, 1337, 0).tolist() == [5, 1, 6, 7, 4, 0, 2, 3]
    assert epoch_permutation(8, 1337, 1).tolist() == [2, 6, 3, 7, 5, 4, 0, 1]


@settings(max_examples=examples(40), deadline=None)
@given(
    n=st.integers(1, 40),
    batch=st.integers(1, 7),
    world=st.integers(1, 4),
    before=st.integers(0, 12),
    after=st.integers(1, 12),
)
def test_resumed_equals_uninterrupted(n: int, batch: int, world: int, before: int, after: int) -> None:
    for rank in range(world):
        whole = take(WindowSampler(n, batch, 1, rank=rank, world_size=world), before + after)
        first = WindowSampler(n, batch, 1, rank=rank, world_size=world)
        head = take(first, before)
        second = WindowSampler(n, batch, 1, rank=rank, world_size=world)
        second.load_state_dict(first.state_dict())
        third = WindowSampler(n, batch, 1, start=before * batch * world, rank=rank, world_size=world)
        assert head + take(second, after) == head + take(third, after) == whole


@settings(max_examples=examples(40), deadline=None)
@given(n=st.integers(1, 40), batch=st.integers(1, 5), world=st.integers(1, 5), batches=st.integers(1, 6))
def test_ranks_together_are_one_stream(n: int, batch: int, world: int, batches: int) -> None:
    ranks = [iter(WindowSampler(n, batch, 9, rank=r, world_size=world)) for r in range(world)]
    together = [window for _ in range(batches) for rank in ranks for window in next(rank)]
    assert together == take(WindowSampler(n, 1, 9), batches * batch * world)


def test_ranks_are_disjoint_within_an_epoch() -> None:
    parts = [set(take(WindowSampler(24, 2, 5, rank=r, world_size=3), 4)) for r in range(3)]
    assert set.union(*parts) == set(range(24))
    assert sum(map(len, parts)) == 24


def test_another_number_of_ranks_goes_on_with_the_same_stream() -> None:
    two = [WindowSampler(50, 3, 2, rank=r, world_size=2) for r in range(2)]
    for sampler in two:
        take(sampler, 4)
    state = two[0].state_dict()
    assert state == two[1].state_dict() == {"position": 24, "seed": 2, "n_windows": 50}
    three = WindowSampler(50, 6, 2)
    three.load_state_dict(state)
    assert take(three, 5) == take(WindowSampler(50, 1, 2), 54)[24:]


def test_prefetching_does_not_move_the_state_that_is_asked_for() -> None:
    sampler = WindowSampler(20, 2, 6, start=4)
    dataset = TokenDataset(np.arange(61), 3)
    loader = iter(torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=1, prefetch_factor=4))
    seen = [next(loader)[0] for _ in range(3)]
    assert sampler.position > 4 + 3 * 2  # it ran ahead
    state = sampler.state_dict(batches=3)
    assert state["position"] == 10
    again = WindowSampler(20, 2, 6)
    again.load_state_dict(state)
    resumed = iter(torch.utils.data.DataLoader(dataset, batch_sampler=again))
    assert torch.equal(next(resumed)[0], next(loader)[0])
    assert len(seen) == 3
    assert again.state_dict(batches=1)["position"] == 12


@pytest.mark.parametrize("change", [{"seed": 2}, {"n_windows": 11}])
def test_a_state_of_another_stream_is_refused(change: dict[str, int]) -> None:
    state = WindowSampler(10, 2, 1).state_dict()
    other = WindowSampler(**({"n_windows": 10, "batch_size": 2, "seed": 1} | change))
    with pytest.raises(DataError, match=r"was 1.*now (2|11); the order of the data would"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    "change", [{"n_windows": 0}, {"batch_size": 0}, {"seed": -1}, {"start": -1}, {"rank": 2, "world_size": 2}]
)
def test_arguments_out_of_range(change: dict[str, int]) -> None:
    with pytest.raises(DataError, match="expected n_windows and batch_size of at least 1"):
        WindowSampler(**({"n_windows": 10, "batch_size": 2, "seed": 1} | change))
