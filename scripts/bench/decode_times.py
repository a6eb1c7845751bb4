"""How calls of decode attention are timed: replays of a graph in turns, and the host's share of an eager call."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def captured(call: Callable[[], Any], turns: int) -> Callable[[], Any]:
    """Return the replay of a graph of so many calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(turns):
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def interleaved(replays: dict[str, Callable[[], Any]], n_steps: int, repeats: int) -> dict[str, list[float]]:
    """Return microseconds a step of each, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(repeats):
        for name, replay in replays.items():
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            replay()
            ended.record()
            torch.cuda.synchronize()
            times[name].append(began.elapsed_time(ended) * 1e3 / n_steps)
    return times


def spread(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "median_us": statistics.median(ordered),
        "p20_us": ordered[len(ordered) // 5],
        "p80_us": ordered[-1 - len(ordered) // 5],
    }


def host_us(step: Callable[[], Any], n_steps: int) -> float:
    """Return the least time that the host spends on an eager call, which returns before its kernels have run."""
    best = math.inf
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(max(1, 20 // n_steps)):
            step()
        best = min(best, (time.perf_counter() - began) / (max(1, 20 // n_steps) * n_steps))
    torch.cuda.synchronize()
    return best * 1e6
