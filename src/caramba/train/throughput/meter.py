"""How fast a phase trains: tokens per second, MFU of a device's peak, and the share of time spent waiting for data."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from caramba.config.estimate.peaks import Arithmetic, peak_flops

_ARITHMETIC: dict[str, Arithmetic] = {"float16": "float16", "bfloat16": "bfloat16"}


@dataclass(frozen=True)
class Work:
    """What one optimiser step does.

    `tokens` are the targets trained on, padding left out; `flops` counts every position that runs, as
    `caramba.config.estimate` does, forward and backward, recomputation left out; None where it is not known.
    """

    tokens: float
    flops: float | None = None


class PhaseMeter:
    """Measures steps between readings, and sums up a phase over interrupts.

    tokens_per_s = tokens / s, mfu = flops / (s * peak_flops), data_wait_share = seconds in the loader's next() / s,
    with s the wall time of training alone: pauses are left out. The first reading after a start holds the warm-up
    (compilation, first kernels), so the summary leaves it out unless it is the only one.

    Args:
        waited: returns the seconds that the process has waited for batches so far.
        peak_flops: the device's dense peak in FLOP/s; None where it is not known, and there is no mfu then.
        clock: seconds of a monotonic clock.
    """

    def __init__(
        self,
        work: Work,
        *,
        waited: Callable[[], float],
        peak_flops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.work, self.peak_flops = work, peak_flops
        self._waited, self._clock = waited, clock
        self._warm = {"steps": 0.0, "seconds": 0.0, "waited": 0.0}
        self._steady = dict(self._warm)
        self._is_first = True
        self._mark = (0, 0.0, 0.0)
        self._paused_at: float | None = None
        self._paused = 0.0

    def start(self, step: int) -> None:
        """Begin to measure after `step` steps."""
        self._mark = (step, self._clock(), self._waited())
        self._paused, self._is_first = 0.0, True

    def pause(self) -> None:
        """Stop the clock, for work that is not training."""
        self._paused_at = self._clock()

    def resume(self) -> None:
        """Resume the clock."""
        if self._paused_at is not None:
            self._paused += self._clock() - self._paused_at
            self._paused_at = None

    def read(self, step: int) -> dict[str, float]:
        """Return the rates since the last reading or start; nothing when no step was taken since."""
        since, began, waited = self._mark
        if step <= since:
            return {}
        now, waited_now = self._clock(), self._waited()
        seconds = max(now - began - self._paused, 1e-9)
        self._mark, self._paused = (step, now, waited_now), 0.0
        taken = {"steps": float(step - since), "seconds": seconds, "waited": waited_now - waited}
        total = self._warm if self._is_first else self._steady
        for name, value in taken.items():
            total[name] += value
        self._is_first = False
        return self._rates(taken)

    def summary(self) -> dict[str, float]:
        """Return the rates of the phase so far, and how many steps they are of."""
        total = self._steady if self._steady["steps"] else self._warm
        if not total["steps"]:
            return {}
        return {**self._rates(total), "steps_measured": total["steps"]}

    def _rates(self, taken: dict[str, float]) -> dict[str, float]:
        rates = {
            "tokens_per_s": self.work.tokens * taken["steps"] / taken["seconds"],
            "data_wait_share": min(taken["waited"] / taken["seconds"], 1.0),
        }
        if self.work.flops is not None and self.peak_flops is not None:
            rates["mfu"] = self.work.flops * taken["steps"] / taken["seconds"] / self.peak_flops
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of the phase."""
        return {"warm": dict(self._warm), "steady": dict(self._steady)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sums of an interrupted phase."""
        self._warm, self._steady = dict(state["warm"]), dict(state["steady"])


def device_peak(device: torch.device, dtype: str, override_tflops: float | None) -> float | None:
    """Return the dense peak of `device` in FLOP/s for matrix products in `dtype`, None where it is not known.

    Products of float32 run in TF32 where torch may use it. `override_tflops` wins over the table.
    """
    if override_tflops is not None:
        return override_tflops * 1e12
    if device.type != "cuda":
        return None
    if dtype.startswith("float8"):
        arithmetic: Arithmetic = "float8"
    elif dtype in _ARITHMETIC:
        arithmetic = _ARITHMETIC[dtype]
    else:
        arithmetic = "float32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return peak_flops(torch.cuda.get_device_name(device), arithmetic)
