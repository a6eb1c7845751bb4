"""The search for a batch: what fits, how close to the most, in how few trials."""

from __future__ import annotations

import pytest

from caramba.experiment.planning import Budget, StepCandidate, Trial, largest_batch

GB = 10**9


class Machine:
    """Memory and time of a step as functions of its batch; past `limit_bytes` it runs out."""

    def __init__(self, base: float, per_sequence: float, limit_bytes: float, overhead_s: float = 0.01) -> None:
        self.base, self.per_sequence, self.limit, self.overhead_s = (
            base,
            per_sequence,
            limit_bytes,
            overhead_s,
        )
        self.asked: list[int] = []

    def peak(self, size: int) -> float:
        return self.base + self.per_sequence * size

    def measure(self, candidate: StepCandidate) -> Trial:
        size = candidate.batch_size
        self.asked.append(size)
        if self.peak(size) > self.limit:
            return Trial(candidate, refusal="out of memory", is_out_of_memory=True)
        seconds = (self.overhead_s + 0.001 * size,) * (candidate.warm_up + candidate.timed)
        return Trial(candidate, seconds, int(self.peak(size)), 1.0)


@pytest.mark.parametrize(
    ("base", "per_sequence"),
    [(2 * GB, 0.1 * GB), (20 * GB, 1.1 * GB), (0.0, 0.003 * GB), (39.6 * GB, 0.4 * GB)],
)
def test_the_most_that_fits_is_found_within_a_few_trials(base: float, per_sequence: float) -> None:
    machine = Machine(base, per_sequence, 45 * GB)
    best, trials, _ = largest_batch(
        machine.measure, StepCandidate(1), target_bytes=40 * GB, most=10**6, budget=Budget(10**9)
    )
    assert best is not None
    true = int((40 * GB - base) // per_sequence)
    assert machine.peak(best.candidate.batch_size) <= 40 * GB
    assert best.candidate.batch_size >= (true - true % 8 if true >= 16 else true) * 0.95
    assert len(trials) <= 10


def test_a_forecast_that_was_wrong_bounds_what_follows() -> None:
    class Growing(Machine):
        def peak(self, size: int) -> float:
            return self.base + self.per_sequence * size**1.5  # steeper than any two points foretell

    machine = Growing(GB, 0.05 * GB, 20 * GB)
    best, _, _ = largest_batch(
        machine.measure, StepCandidate(1), target_bytes=18 * GB, most=10**6, budget=Budget(10**9)
    )
    assert best is not None
    assert 44 <= best.candidate.batch_size <= 48  # (17 / 0.05)^(2/3) = 48.7
    assert len(machine.asked) == len(set(machine.asked))


def test_bounds_of_data_time_and_one_sequence() -> None:
    few, _, _ = largest_batch(
        Machine(0, GB, 10**12).measure, StepCandidate(1), target_bytes=10**12, most=5, budget=Budget(10**9)
    )
    assert few is not None
    assert few.candidate.batch_size == 5
    budget = Budget(4.05, clock=lambda: 0.0)
    short, _, _ = largest_batch(
        Machine(0, 1.0, 10**12, overhead_s=0.1).measure,
        StepCandidate(1),
        target_bytes=10**12,
        most=10**6,
        budget=budget,
    )
    assert short is not None
    assert short.candidate.batch_size == 2
    assert budget.skipped == ["batch 8, float32: about 5 s, 4 s of 4 s left for it"]
    for _ in range(2):
        budget.skip("a graph", "too slow")
    assert budget.skipped[1:] == ["a graph: too slow"], "once, whoever has to do without it"
    none, trials, _ = largest_batch(
        Machine(9, 9, 10).measure, StepCandidate(1), target_bytes=10, most=8, budget=Budget()
    )
    assert none is None
    assert trials[0].is_out_of_memory


def test_a_slower_batch_is_not_taken_for_its_size() -> None:
    class Swapping(Machine):
        def measure(self, candidate: StepCandidate) -> Trial:
            trial = super().measure(candidate)
            slow = 2.0 if candidate.batch_size > 8 else 1.0
            return Trial(candidate, tuple(slow * item for item in trial.seconds), trial.peak_bytes)

    machine = Swapping(0, GB, 10**15, overhead_s=0.002)
    best, _, _ = largest_batch(machine.measure, StepCandidate(1), target_bytes=10**15, most=10**6, budget=Budget(10**9))
    assert best is not None
    assert best.candidate.batch_size == 8
    assert machine.asked == [1, 2, 8, 32, 128]


@pytest.mark.parametrize(("limit", "asked"), [(40 * GB, [16, 32]), (12 * GB, [16, 8, 11])])
def test_a_search_goes_on_from_what_is_known(limit: float, asked: list[int]) -> None:
    machine = Machine(GB, GB, limit)
    known = machine.measure(StepCandidate(2))
    machine.asked.clear()
    best, trials, _ = largest_batch(
        machine.measure,
        StepCandidate(1),
        target_bytes=limit,
        most=10**6,
        budget=Budget(10**9),
        known=known,
        first=16,
    )
    assert best is not None
    assert (machine.asked, best.candidate.batch_size) == (asked, asked[-1])
    assert trials[0] is known
    none, tried, _ = largest_batch(
        Machine(9, 9, 10).measure, StepCandidate(1), target_bytes=10, most=8, budget=Budget(), first=8
    )
    assert none is None
    assert [trial.candidate.batch_size for trial in tried] == [8, 4, 2, 1]


@pytest.mark.parametrize("most", [20, 23, 30, 31, 100, 512])
def test_a_search_says_whether_memory_or_the_most_ended_it(most: int) -> None:
    for fitting in {*range(1, 41), 95, 99, 100, 101, 500, 511, 512, 513}:
        for ground in (0, 7):
            machine = Machine(ground, 1, fitting + ground)
            best, _, ended = largest_batch(
                machine.measure,
                StepCandidate(1),
                target_bytes=fitting + ground,
                most=most,
                budget=Budget(clock=lambda: 0.0),
            )
            assert best is not None
            assert ended == ("most" if fitting >= most else "memory"), (fitting, ground, machine.asked)
