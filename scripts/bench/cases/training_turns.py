"""Turns of training sides within one process: blocks of our steps with a block of every other side between two."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from cases.training_sides import Side

from caramba.runtime import synchronize

WARM_UP = 5
LEAST_TURNS = 2  # that are measured after the time is up, so that a part that was begun has a figure


class Turns(pl.Callback):
    """Times blocks of our steps, and between two of them a block of every other side. Ends training after `turns`.

    Attributes:
        seconds: side -> seconds a step of each turn. peaks: side -> peak bytes, without what the others hold.
    """

    def __init__(
        self,
        sides: dict[str, Side],
        device: torch.device,
        *,
        steps: int,
        turns: int,
        deadline: float,
        tokens: int = 0,
    ) -> None:
        self.sides, self.device, self.deadline = sides, device, deadline
        self.steps, self.turns, self.tokens = steps, turns, tokens
        self.seconds: dict[str, list[float]] = {name: [] for name in ("caramba", *sides)}
        self.peaks: dict[str, int] = {}
        self.is_warm, self.taken, self.clock = False, 0, 0.0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.taken += 1
        if self.taken < (self.steps if self.is_warm else WARM_UP):
            return
        synchronize(self.device)
        if self.is_warm:
            self.seconds["caramba"].append((time.perf_counter() - self.clock) / self.taken)
            self._note_peak("caramba", self._held_by_others())
        self._run_others(trainer)
        self._say()
        done = len(self.seconds["caramba"])
        if done >= self.turns or (done >= LEAST_TURNS and time.monotonic() > self.deadline):
            trainer.should_stop = True
            return  # the phase's own monitor reads the peak of this turn after training
        self.taken = 0
        self._reset_peak()
        synchronize(self.device)
        self.clock = time.perf_counter()

    def _run_others(self, trainer: pl.Trainer) -> None:
        for parameter in trainer.lightning_module.parameters():
            assert parameter.grad is None  # what a peer's peak would hold
        with torch.enable_grad():
            for name, side in self.sides.items():
                with side.surroundings():
                    self._run(name, side)
        self.is_warm = True

    def _run(self, name: str, side: Side) -> None:
        if not self.is_warm:
            began = time.perf_counter()
            for _ in range(WARM_UP):
                side.step()
            synchronize(self.device)
            print(f"  {name}: warm after {time.perf_counter() - began:.0f} s", flush=True)
            return
        self._reset_peak()
        synchronize(self.device)
        before, began = self._allocated(), time.perf_counter()
        for _ in range(self.steps):
            side.step()
        synchronize(self.device)
        self.seconds[name].append((time.perf_counter() - began) / self.steps)
        self._note_peak(name, before - side.held_bytes())

    def _say(self) -> None:
        done = len(self.seconds["caramba"])
        if done and self.tokens:
            rates = ", ".join(
                f"{name} {self.tokens / taken[-1]:,.0f}" for name, taken in self.seconds.items()
            )
            print(f"  turn {done} of {self.turns}, tokens/s: {rates}", flush=True)

    def _held_by_others(self) -> int:
        return sum(side.held_bytes() for side in self.sides.values())

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def _reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _note_peak(self, name: str, others: int) -> None:
        if self.device.type == "cuda":
            self.peaks[name] = max(self.peaks.get(name, 0), torch.cuda.max_memory_allocated() - others)


def rows_of(turns: Turns, flops: float, peak: float | None) -> dict[str, dict[str, Any]]:
    """Return side -> rates, step time, MFU by `flops` a token over `peak` FLOP/s, and peak memory."""
    rows = {}
    for name, seconds in turns.seconds.items():
        rates = sorted(turns.tokens / value for value in seconds)
        rate = statistics.median(rates)
        rows[name] = {
            "tokens_per_s": rate,
            "p20": rates[len(rates) // 5],
            "p80": rates[-1 - len(rates) // 5],
            "all": rates,
            "step_ms": 1e3 * statistics.median(seconds),
            "mfu": peak and rate * flops / peak,
            "peak_bytes": turns.peaks.get(name),
        }
    return rows


def ratios_of(turns: Turns) -> dict[str, float]:
    """Return other side -> our speed over its own, the median of turns."""
    return {
        name: statistics.median(b / a for a, b in zip(turns.seconds["caramba"], theirs, strict=False))
        for name, theirs in turns.seconds.items()
        if name != "caramba"
    }


class Traced(pl.Callback):
    """Times a few steps of ours, traces three more with the shapes of every op, and writes the trace."""

    TIMED, STEPS = 8, 3

    def __init__(self, path: Path, device: torch.device) -> None:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self.profiler = torch.profiler.profile(activities=kinds, record_shapes=True)
        self.path, self.device, self.taken = path, device, 0
        self.step_ms, self.clock = 0.0, 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.taken += 1
        if self.taken == WARM_UP:
            synchronize(self.device)
            self.clock = time.perf_counter()
        if self.taken == WARM_UP + self.TIMED:
            synchronize(self.device)
            self.step_ms = 1e3 * (time.perf_counter() - self.clock) / self.TIMED
            self.profiler.start()
        if self.taken == WARM_UP + self.TIMED + self.STEPS:
            synchronize(self.device)
            self.profiler.stop()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.profiler.export_chrome_trace(str(self.path))
            trainer.should_stop = True
