from __future__ import annotations

import math

import pytest
import torch

from caramba.config.estimate.peaks import peak_flops
from caramba.train.throughput import PeakMemory, PhaseMeter, RunningLoss, Work, device_peak


class Hands:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = self.waited = 0.0

    def meter(self) -> PhaseMeter:
        work = Work(tokens=100.0, flops=2e9)
        return PhaseMeter(work, waited=lambda: self.waited, peak_flops=1e10, clock=lambda: self.now)


def test_rates_are_of_training_time_alone() -> None:
    hands = Hands()
    meter = hands.meter()
    meter.start(7)
    assert meter.summary() == {}
    hands.now, hands.waited = 40.0, 9.0
    assert meter.read(8)["tokens_per_s"] == 100 / 40, "warm-up"
    meter.pause()
    hands.now = 90.0
    meter.resume()
    hands.now, hands.waited = 94.0, 10.0
    rates = {"tokens_per_s": 10 * 100 / 4, "data_wait_share": 1 / 4, "mfu": 10 * 2e9 / 4 / 1e10}
    assert meter.read(18) == rates
    assert meter.read(18) == {}, "no step since"
    assert meter.summary() == {**rates, "steps_measured": 10.0}, "the warm-up is left out"


def test_a_resumed_phase_sums_up_both_processes() -> None:
    hands = Hands()
    first = hands.meter()
    first.start(0)
    for step in (10, 20):
        hands.now += 5.0
        first.read(step)
    second = hands.meter()
    second.load_state_dict(first.state_dict())
    second.start(20)
    for step, seconds in ((30, 50.0), (40, 15.0)):
        hands.now += seconds
        second.read(step)
    assert second.summary()["tokens_per_s"] == 20 * 100 / 20.0
    assert second.summary()["steps_measured"] == 20.0


def test_the_running_loss_goes_on_where_it_was() -> None:
    whole, first, second = RunningLoss(4), RunningLoss(4), RunningLoss(4)
    assert math.isnan(whole.mean())
    for value in range(10):
        whole.add(torch.tensor(float(value)))
        (first if value < 7 else second).add(torch.tensor(float(value)))
        if value == 6:
            second.load_state_dict(first.state_dict())
    assert whole.mean() == second.mean() == (6 + 7 + 8 + 9) / 4


@pytest.mark.parametrize(
    ("name", "arithmetic", "expected"),
    [
        ("NVIDIA H200", "bfloat16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5e12),
        ("NVIDIA A100-SXM4-80GB", "float8", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", None),
        ("NVIDIA GeForce RTX 4090", "bfloat16", None),
    ],
)
def test_peaks_are_of_the_device_and_the_arithmetic(name: str, arithmetic: str, expected: float | None) -> None:
    assert peak_flops(name, arithmetic) == expected  # type: ignore[arg-type]


def test_no_peak_is_made_up_for_a_cpu() -> None:
    assert device_peak(torch.device("cpu"), "bfloat16", None) is None
    assert device_peak(torch.device("cpu"), "bfloat16", 0.5) == 5e11


def test_resident_memory_is_seen_and_kept() -> None:
    memory = PeakMemory(torch.device("cpu"))
    seen = memory.read().get("peak_resident_bytes", 0.0)
    assert seen > 2**20
    later = PeakMemory(torch.device("cpu"))
    later.load_state_dict({"peaks": {"peak_resident_bytes": 2 * seen + 2**40}})
    assert later.read()["peak_resident_bytes"] == 2 * seen + 2**40
