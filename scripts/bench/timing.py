"""The one timer: seconds of a call by the clock or by device events, sides in turns, and their spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from caramba.runtime import synchronize


def wall_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of a call, host and device: the device is idle before and after."""
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - began


def device_seconds(call: Callable[[], Any], device: torch.device, queue_cycles: int = 0) -> float:
    """Return the seconds of a call between two device events; on a CPU, by the clock.

    With `queue_cycles` the device first sleeps that many cycles, so that it does not wait for the host.
    """
    if device.type != "cuda":
        return wall_seconds(call, device)
    torch.cuda.synchronize()
    if queue_cycles:
        torch.cuda._sleep(queue_cycles)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    call()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


def host_seconds(call: Callable[[], Any], device: torch.device, calls: int, repeats: int) -> float:
    """Return the least mean seconds that the host takes for a call; queued device work does not count."""
    best = float("inf")
    for _ in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - began) / calls)
    synchronize(device)
    return best


def interleave(
    sides: Mapping[str, Callable[[], float]],
    *,
    repeats: int = 0,
    seconds: float = 0.0,
    warm: int = 0,
    most: int = 1_000_000,
) -> dict[str, list[float]]:
    """Return what each side measured, one measurement a side in turn, so that drift of the machine meets all.

    Takes `repeats` turns, then more until `seconds` have passed or there are `most`. The first `warm` of each side
    are measured too and left out.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    deadline, turn = time.perf_counter() + seconds, 0
    while turn < repeats + warm or (time.perf_counter() < deadline and turn < most):
        for name, side in sides.items():
            times[name].append(side())
        turn += 1
    return {name: values[warm:] for name, values in times.items()}


def spread(values: list[float], unit: str = "ms") -> dict[str, float]:
    """Return median and the middle 60% of seconds, in `ms` or `us`, as `median_ms`, `p20_ms`, `p80_ms`."""
    scale = {"ms": 1e3, "us": 1e6}[unit]
    ordered = sorted(value * scale for value in values)
    cut = len(ordered) // 5
    return {
        f"median_{unit}": statistics.median(ordered),
        f"p20_{unit}": ordered[cut],
        f"p80_{unit}": ordered[-1 - cut],
    }


def median_seconds(call: Callable[[], Any], device: torch.device, repeats: int, queue_cycles: int = 0) -> float:
    """Return the median device seconds of a call, after one to warm up."""
    call()
    return statistics.median(device_seconds(call, device, queue_cycles) for _ in range(repeats))


def capture(call: Callable[[], Any], turns: int) -> Callable[[], Any]:
    """Return the replay of a CUDA graph of so many calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(turns):
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def read_rate(device: torch.device) -> float:
    """Return bytes per second of reading memory: the roof of a decode step."""
    if device.type == "cuda":
        from read_bandwidth import read_bandwidth

        return read_bandwidth()
    x = torch.ones(1 << 24)
    return x.numel() * 4 / median_seconds(x.sum, device, 5)
