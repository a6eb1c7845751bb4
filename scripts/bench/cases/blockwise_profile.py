"""Where a blockwise step's time goes: device kernels by phase, counted and timed by torch's profiler, as text.

A kernel belongs to the phase in which the operator started that launched it, whenever the device ran it. Without an
accelerator the operators themselves are listed, each without those that it calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from caramba.runs.files import whole_file
from caramba.runtime import synchronize

STEPS = 3
TOP = 40
NAME_WIDTH = 150
MARK = "ended: "
LAST, UNKNOWN = "after the last mark", "by no operator"


class Rows:
    """Microseconds and counts of kernels by phase and name."""

    def __init__(self) -> None:
        self.spent: dict[tuple[str, str], float] = defaultdict(float)
        self.count: dict[tuple[str, str], int] = defaultdict(int)

    def add(self, phase: str, name: str, microseconds: float) -> None:
        self.spent[phase, name] += microseconds
        self.count[phase, name] += 1

    def of(self, phase: str) -> float:
        return sum(spent for (found, _), spent in self.spent.items() if found == phase)

    def table(self, keys: list[tuple[str, str]]) -> Iterator[str]:
        yield f"{'ms/step':>9s} {'share':>6s} {'calls/step':>10s}  {'phase':16s} kernel"
        total = sum(self.spent.values()) or 1.0
        for phase, name in keys:
            spent, count = self.spent[phase, name], self.count[phase, name]
            yield (
                f"{spent / 1000 / STEPS:9.3f} {spent / total:6.1%} {count / STEPS:10.1f}  {phase:16s} "
                f"{' '.join(name.split())[:NAME_WIDTH]}"
            )


def write_profile(
    path: Path, step: Callable[[Callable[[str], None]], object], device: torch.device, phases: tuple[str, ...]
) -> None:
    """Profile STEPS calls of step(mark), warmed up, and write the tables; `mark(phase)` says which phase just ended."""

    def mark(phase: str) -> None:
        with record_function(MARK + phase):
            pass

    step(lambda _phase: None)
    synchronize(device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        for _ in range(STEPS):
            step(mark)
        synchronize(device)
    rows = by_phase(profiler.events() or [], is_cuda=device.type == "cuda")
    total = sum(rows.spent.values())
    lines = [f"{STEPS} steps on {_name(device)}, torch {torch.__version__}", ""]
    if device.type == "cuda":
        lines += [*gaps(profiler.events() or []), ""]
    for phase in (*phases, LAST, UNKNOWN):
        count = sum(count for (found, _), count in rows.count.items() if found == phase)
        if count:
            spent = rows.of(phase)
            lines.append(
                f"{phase:20s} {spent / 1000 / STEPS:9.3f} ms/step {spent / total:6.1%} {count / STEPS:8.1f} calls/step"
            )
    keys = sorted(rows.spent, key=lambda key: -rows.spent[key])
    lines += ["", f"top {TOP} of all", *rows.table(keys[:TOP])]
    for phase in (*phases, UNKNOWN):
        lines += ["", f"top {TOP} of {phase}", *rows.table([key for key in keys if key[0] == phase][:TOP])]
    with whole_file(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n")


def by_phase(events: Any, *, is_cuda: bool) -> Rows:
    """Return the kernels by phase; those that no operator launched, as compiled ones, have a phase of their own."""
    marks = sorted(
        (event.time_range.start, event.name.removeprefix(MARK))
        for event in events
        if event.device_type.name == "CPU" and event.name.startswith(MARK)
    )
    rows, on_device = Rows(), Rows()
    for event in events:
        if event.name.startswith(MARK):
            continue
        if event.device_type.name != "CPU":
            if not event.is_user_annotation:
                on_device.add(UNKNOWN, event.name, event.time_range.elapsed_us())
            continue
        phase = next((name for at, name in marks if at >= event.time_range.start), LAST)
        if not is_cuda:
            rows.add(phase, event.name, event.self_cpu_time_total)
        for kernel in event.kernels:
            if kernel.name != event.name:  # an annotation's span on the device is no kernel
                rows.add(phase, kernel.name, kernel.duration)
    launched: dict[str, float] = defaultdict(float)
    for (_, name), spent in rows.spent.items():
        launched[name] += spent
    for (_, name), spent in on_device.spent.items():
        if spent - launched[name] > 1.0:  # what rounding leaves is no kernel
            rows.spent[UNKNOWN, name] = spent - launched[name]
            rows.count[UNKNOWN, name] = on_device.count[UNKNOWN, name]
    for key in rows.spent if is_cuda else ():
        # Some kernels are listed by two operators: what the device spent is all that there is.
        spent = on_device.spent[UNKNOWN, key[1]]
        if key[0] != UNKNOWN and launched[key[1]] > spent:
            rows.spent[key] *= spent / launched[key[1]]
    return rows


def gaps(events: Any) -> list[str]:
    """Return how long the device was busy and idle from the first kernel to the last, and beside what it was idle."""
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in events
        if event.device_type.name != "CPU" and not event.is_user_annotation
    )
    idle = Rows()
    busy, (_, until, before) = 0.0, spans[0]
    for start, end, name in spans:
        if start > until:
            idle.add(before.split("(")[0][:60], name.split("(")[0][:60], start - until)
        busy += max(end - max(start, until), 0.0)
        if end > until:
            until, before = end, name
    busy += spans[0][1] - spans[0][0]
    lost = sum(idle.spent.values())
    rows = sorted(idle.spent, key=lambda key: -idle.spent[key])[:10]
    return [
        f"busy {busy / 1000 / STEPS:.3f} ms/step, idle {lost / 1000 / STEPS:.3f}, most of it between",
        *(
            f"{idle.spent[key] / 1000 / STEPS:9.3f} {idle.count[key] / STEPS:8.1f}  {key[0]} -> {key[1]}"
            for key in rows
        ),
    ]


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
