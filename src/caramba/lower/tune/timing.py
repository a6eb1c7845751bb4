"""Interleaved timing: disturbances of the machine affect all candidates alike."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

WARM_UP, LEAST_ROUNDS, MOST_ROUNDS = 3, 5, 50


@dataclass(frozen=True)
class Timed:
    """A call and the name of its times."""

    name: str
    call: Callable[[], object]


def time_interleaved(
    items: Sequence[Timed], device: torch.device, seconds: float, least: int | None = None
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return milliseconds of each call by name, one per round, and the error messages of those that failed.

    At least 5 rounds, then more while `seconds` last, at most 50. All calls take part, or with `least` that many and
    more while half of the time lasts.
    """
    began = time.perf_counter()
    steps: dict[str, Callable[[], float]] = {}
    refused: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a refusal comes with a warning for every backend
        for item in items:
            if least is not None and len(steps) >= least and time.perf_counter() - began > seconds / 2:
                break
            try:
                steps[item.name] = _step(item.call, device)
            except (
                RuntimeError,
                ValueError,
                ImportError,
            ) as error:  # not this shape, no compiler, or memory is full
                refused[item.name] = _reason(error)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for done in range(MOST_ROUNDS):
        if done >= LEAST_ROUNDS and time.perf_counter() - began > seconds:
            break
        for name, step in steps.items():
            times[name].append(step())
    return times, refused


def _reason(error: Exception) -> str:
    """Return the first non-empty line of an error, cut to 200 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]


def _step(call: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """Warm a call up; return a function that runs it once and returns milliseconds."""
    if device.type == "cuda":
        return _graph_step(call, device)
    for _ in range(WARM_UP):
        call()

    def once() -> float:
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e3

    return once


def _graph_step(call: Callable[[], object], device: torch.device) -> Callable[[], float]:
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def once() -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended)

    graph.replay()  # the first one uploads it
    torch.cuda.synchronize(device)
    return once
