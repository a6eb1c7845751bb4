"""The curves of a run, thinned: each bucket of points keeps its lowest and its highest, so that no spike is lost."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from caramba.runs.events import EVENTS, PHASE_STARTED

FINE, COARSE = 600, 100
"""Most points of a curve on a page with few curves, and on one with many."""
MOST_CURVES = 12
# The order in which curves are kept where a phase recorded more.
_FIRST = ("loss", "running_loss", "val_loss", "lr", "tokens_per_s", "grad_norm")
_NOT_FINITE = ("nan", "inf", "-inf")


@dataclass(frozen=True)
class Curve:
    """Values of one metric in one phase: steps, seconds since the phase began, values."""

    phase: str
    key: str
    steps: Sequence[float]
    seconds: Sequence[float]
    values: Sequence[float]

    def rename_phase(self, phase: str) -> Curve:
        return replace(self, phase=phase)

    def pack(self, most: int) -> bytes:
        """Return at most `most` points as little-endian float32: all steps, all seconds, all values."""
        kept = thin(self.values, most)
        columns = [[column[index] for index in kept] for column in (self.steps, self.seconds, self.values)]
        return b"".join(struct.pack(f"<{len(kept)}f", *column) for column in columns)


@dataclass
class PhaseEvents:
    """What a phase recorded; `seconds` is its training time over all sittings."""

    name: str
    began: float = 0.0
    earlier: float = 0.0
    seconds: float = 0.0
    n_not_finite: int = 0
    points: dict[str, dict[int, tuple[float, float]]] = field(default_factory=lambda: {})

    @property
    def curves(self) -> list[Curve]:
        order = {key: index for index, key in enumerate(_FIRST)}
        keys = sorted(self.points, key=lambda key: order.get(key, len(order)))
        curves: list[Curve] = []
        for key in keys[:MOST_CURVES]:
            listed = sorted(self.points[key].items())
            seconds, values = [item[1][0] for item in listed], [item[1][1] for item in listed]
            curves.append(Curve(self.name, key, [step for step, _ in listed], seconds, values))
        return curves


def thin(values: Sequence[float], most: int) -> list[int]:
    """Return the indices of at most `most` points, the first and the last among them, and every bucket's extremes."""
    n = len(values)
    if n <= most:
        return list(range(n))
    n_buckets = max(1, (most - 2) // 2)
    kept = {0, n - 1}
    for bucket in range(n_buckets):
        indices = range(bucket * n // n_buckets, (bucket + 1) * n // n_buckets)
        part = values[indices.start : indices.stop]
        kept.add(indices.start + part.index(min(part)))
        kept.add(indices.start + part.index(max(part)))
    return sorted(kept)


def read_phases(folder: Path) -> list[PhaseEvents]:
    """Return the phases of a run's events in order. A step that was repeated counts once.

    A line that a killed writer cut short is skipped; any other that is no JSON raises ValueError.
    """
    path = folder / EVENTS
    if not path.is_file():
        return []
    phases: dict[str, PhaseEvents] = {}
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines):
        # Other events are many in some runs, and are not needed.
        if b'"metrics"' not in line and PHASE_STARTED.encode() not in line:
            continue
        try:
            event = json.loads(line)
        except ValueError:
            if number + 1 >= len(lines) or lines[number + 1][:1] in (b"{", b""):
                continue
            raise
        _add(phases, event)
    return list(phases.values())


def _add(phases: dict[str, PhaseEvents], event: dict[str, Any]) -> None:
    kind = event.get("event")
    if kind not in ("metrics", PHASE_STARTED):
        return
    name, time = event["phase"], event["time"]
    phase = phases.get(name)
    if phase is None:
        phase = phases[name] = PhaseEvents(name, began=time)
    if kind == PHASE_STARTED:
        phase.began, phase.earlier = time, event.get("earlier_s", 0.0)
        return
    step = event["step"]
    phase.seconds = seconds = phase.earlier + max(0.0, time - phase.began)
    for key, value in event["values"].items():
        if "/" in key:  # one for each block or layer
            continue
        if not isinstance(value, float | int):
            if value not in _NOT_FINITE:
                raise ValueError(f"{name} step {step}: {key} is {value!r}, expected a number")
            phase.n_not_finite += 1
        elif math.isfinite(value):
            phase.points.setdefault(key, {})[step] = (seconds, value)
