"""A profile of a few steady steps of a phase: a Chrome trace, a table of its ops, and on CUDA a memory snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from caramba.runs.files import csv_text, whole_file, write_whole

WAIT, WARM_UP, ACTIVE = 5, 2, 3  # compilation and first kernels come before, and the profiler's own start
TOP = 30
TRACE, OPS, TABLE, MEMORY = "trace.json", "top_ops.csv", "top_ops.txt", "memory.pickle"


@dataclass(frozen=True)
class OpTime:
    """What one op or kernel took in the profiled steps; `self` times leave out what it called. Microseconds."""

    name: str
    calls: int
    self_cpu_us: float
    cpu_us: float
    self_device_us: float
    device_us: float


class PhaseProfile:
    """Profiles up to three steps in the middle of `steps`, and writes the files of `folder` when they are done.

    With CUDA every phase and step is an NVTX range besides, for Nsight Systems.

    Args:
        folder: where trace.json, top_ops.csv, top_ops.txt and, on CUDA, memory.pickle are written.
        steps: how many optimiser steps this process will take.
    """

    def __init__(self, folder: Path, name: str, steps: int, device: torch.device) -> None:
        self.folder, self.name, self.device = folder, name, device
        self.wait, self.warm_up, self.active = span(steps)
        self.has_written = False
        self._is_cuda = device.type == "cuda"
        self._done = 0
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._is_cuda else [])]
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=self.wait, warmup=self.warm_up, active=self.active, repeat=1),
            on_trace_ready=self._write,
            profile_memory=True,
            acc_events=True,
        )

    def start(self) -> None:
        """Begin a phase."""
        if self._is_cuda:
            torch.cuda.nvtx.range_push(self.name)
        self._profile.start()
        self._record_memory()

    def begin_step(self) -> None:
        """Mark where an optimiser step begins."""
        if self._is_cuda:
            torch.cuda.nvtx.range_push(f"{self.name} step {self._done}")

    def end_step(self) -> None:
        """Mark where an optimiser step ends."""
        if self._is_cuda:
            torch.cuda.nvtx.range_pop()
        self._done += 1
        self._profile.step()
        self._record_memory()

    def stop(self) -> None:
        """End a phase, written or not."""
        self._profile.stop()
        if self._is_cuda:
            torch.cuda.nvtx.range_pop()
            torch.cuda.memory._record_memory_history(enabled=None)

    def _record_memory(self) -> None:
        if self._is_cuda and self._done == self.wait + self.warm_up:
            torch.cuda.memory._record_memory_history(max_entries=200_000)

    def _write(self, done: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with whole_file(self.folder / TRACE) as temporary:
            done.export_chrome_trace(str(temporary))
        ops = op_times(done.key_averages(), by_device=self._is_cuda)
        write_whole(self.folder / OPS, as_csv(ops))
        write_whole(self.folder / TABLE, as_text(ops[:TOP], self.name, self.active, by_device=self._is_cuda))
        if self._is_cuda:
            with whole_file(self.folder / MEMORY) as temporary:
                torch.cuda.memory._dump_snapshot(str(temporary))
        self.has_written = True


def span(steps: int) -> tuple[int, int, int]:
    """Return how many of `steps` steps pass unseen, warm the profiler up, and are profiled: fewer in a short phase."""
    active = min(ACTIVE, max(1, steps - 1))
    warm_up = min(WARM_UP, max(0, steps - active))
    return min(WAIT, max(0, steps - active - warm_up)), warm_up, active


def op_times(events: Any, *, by_device: bool) -> list[OpTime]:
    """Return what every op took, the longest first: by its own time on the device, else on the CPU."""
    rows = [
        OpTime(
            event.key,
            event.count,
            event.self_cpu_time_total,
            event.cpu_time_total,
            event.self_device_time_total,
            event.device_time_total,
        )
        for event in events
        if not event.key.startswith("ProfilerStep")
    ]
    return sorted(rows, key=lambda row: -(row.self_device_us if by_device else row.self_cpu_us))


def as_csv(rows: Sequence[OpTime]) -> str:
    """Return every op with its times."""
    times = ([row.name, row.calls, *(round(value, 3) for value in _times(row))] for row in rows)
    return csv_text([OpTime.__dataclass_fields__, *times])


def as_text(rows: Sequence[OpTime], name: str, steps: int, *, by_device: bool) -> str:
    """Return a table for people: milliseconds per step and share of the listed ops' time, the longest first."""
    own = [row.self_device_us if by_device else row.self_cpu_us for row in rows]
    total = sum(own) or 1.0
    where = "device" if by_device else "CPU"
    lines = [
        f"{name}: the {len(rows)} ops with the most {where} time of their own, mean of {steps} steps",
        f"{'ms/step':>10}  {'share':>6}  {'calls':>8}  op",
    ]
    lines += [
        f"{time / 1000 / steps:10.3f}  {time / total:6.1%}  {row.calls / steps:8.1f}  {row.name[:120]}"
        for row, time in zip(rows, own, strict=True)
    ]
    return "\n".join(lines) + "\n"


def _times(row: OpTime) -> tuple[float, ...]:
    return row.self_cpu_us, row.cpu_us, row.self_device_us, row.device_us
