"""How fast a phase trains: tokens per second, MFU of a device's peak, and the share of time spent waiting for data."""

from __future__ import annotations

import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from caramba.config.estimate.peaks import Arithmetic, peak_flops
from caramba.optim.clip import clipping_step, tensor_norms
from caramba.optim.groups import complete_squares, is_sharded, local
from caramba.runtime import all_agree, free_bytes, gather_objects, get_world_size, is_distributed


class RunningLoss:
    """The losses of the last `window` optimiser steps, stored on their device.

    Adding one does not synchronise with the device.

    The loss of a step weighs its micro-batches and ranks as its gradient does, so that the mean does not depend on how
    a batch is split.
    """

    def __init__(self, window: int = 50) -> None:
        self._losses: deque[Tensor] = deque(maxlen=window)

    def add(self, loss: Tensor) -> None:
        """Add a copy of the loss [] of an optimiser step; a CUDA graph overwrites the original."""
        self._losses.append(loss.detach().float().clone())

    def mean(self, *, over_ranks: bool = False) -> float:
        """Return the mean over the window in nats, NaN before the first step.

        Args:
            over_ranks: average the ranks too, where each adds a loss of its own; every rank calls this then.
        """
        if not self._losses:
            return float("nan")
        device = self._losses[-1].device
        mean = torch.stack([loss.to(device) for loss in self._losses]).mean()
        if over_ranks and is_distributed():
            torch.distributed.all_reduce(mean)
            mean /= get_world_size()
        return float(mean)

    def state_dict(self) -> dict[str, list[float]]:
        """Return the losses in the window."""
        return {"losses": [float(loss) for loss in self._losses]}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Continue from the losses of an interrupted phase."""
        self._losses.clear()
        self._losses.extend(torch.tensor(value) for value in state["losses"])


_STATM = Path("/proc/self/statm")


class PeakMemory:
    """The most memory that a phase has had, in bytes, over interrupts.

    On CUDA the allocator's peaks, allocated and reserved. Elsewhere the largest of the values seen when read: on MPS
    the allocator's and the driver's, on a CPU the pages that the process holds (`peak_resident_bytes`; Linux only).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._peaks: dict[str, float] = {}

    def reset(self) -> None:
        """Begin a phase."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def read(self) -> dict[str, float]:
        """Return the peaks so far."""
        for name, value in self._now().items():
            self._peaks[name] = max(self._peaks.get(name, 0.0), float(value))
        return self.peaks

    @property
    def peaks(self) -> dict[str, float]:
        """The peaks as they were last read: what comes after a phase is not of it."""
        return dict(self._peaks)

    def leaves_room_for(self, size: int) -> bool:
        """True if `size` more bytes do not raise the peak; off CUDA, if they fit in half of free memory."""
        if self.device.type != "cuda":
            return 2 * size <= free_bytes(self.device)
        allocated = torch.cuda.memory_allocated(self.device)
        return allocated + size <= torch.cuda.max_memory_allocated(self.device)

    def _now(self) -> dict[str, int]:
        if self.device.type == "cuda":
            return {
                "peak_allocated_bytes": torch.cuda.max_memory_allocated(self.device),
                "peak_reserved_bytes": torch.cuda.max_memory_reserved(self.device),
            }
        if self.device.type == "mps":
            return {
                "peak_allocated_bytes": torch.mps.current_allocated_memory(),
                "peak_reserved_bytes": torch.mps.driver_allocated_memory(),
            }
        if not _STATM.is_file():
            return {}
        return {"peak_resident_bytes": int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")}

    def state_dict(self) -> dict[str, Any]:
        """Return the peaks so far."""
        return {"peaks": self.read()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the peaks of an interrupted phase."""
        self._peaks = dict(state["peaks"])


LAYER_GRAD_NORM, UPDATE_NORM = "layer_grad_norm", "update_norm"
_LAYER = re.compile(r"(.*\.\d+)\.")


class StepNorms:
    """Measures the steps that `is_due` names, through hooks on the optimiser.

    update_norm = |theta_after - theta_before|_2 over everything that trains, and layer_grad_norm/LAYER the 2-norm of
    the gradient that the step uses (after clipping) of every layer that holds a matrix. Values stay on the device
    until `read`. The update needs a copy of what trains; where `has_room` denies it the update goes unmeasured.

    Args:
        named: names and tensors of what trains, as the model names them.
        is_due: whether the step that is being taken is measured.
        has_room: whether that many bytes may be taken for the time of the step.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        *,
        is_due: Callable[[], bool],
        has_room: Callable[[int], bool],
    ) -> None:
        self._parameters = dict(named)
        self._is_due, self._has_room = is_due, has_room
        self._layers = layers_of(self._parameters)
        self._is_sharded = any(is_sharded(p) for p in self._parameters.values())
        self._size = sum(local(p).numel() * p.element_size() for p in self._parameters.values())
        self._before: list[Tensor] | None = None
        self._measured: dict[str, Tensor] = {}
        self._hooks: list[Any] = []

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Watch the steps of an optimiser."""
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._begin(optimizer)),
            optimizer.register_step_post_hook(lambda *_: self._end()),
        ]

    def detach(self) -> None:
        """Leave the optimiser as it was."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._before = [], None

    def read(self) -> dict[str, float]:
        """Return what the last measured step measured, once."""
        measured, self._measured = self._measured, {}
        if not measured:
            return {}
        values = torch.stack(list(measured.values())).tolist()  # one transfer for all
        return dict(zip(measured, values, strict=True))

    @torch.no_grad()
    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        self._before = None
        if not self._is_due():
            return
        self._measured = self._layer_norms()
        step = clipping_step(optimizer)
        if step is not None and step.clip is not None:  # by which the step multiplies what it reads
            self._measured = {name: norm * step.clip for name, norm in self._measured.items()}
        has_room = self._has_room(self._size)
        if self._is_sharded:  # a norm of parts is taken by all ranks or none
            has_room = all_agree(has_room, next(iter(self._parameters.values())).device)
        if has_room:
            self._before = [local(p.detach()).clone() for p in self._parameters.values()]

    @torch.no_grad()
    def _end(self) -> None:
        before, self._before = self._before, None
        if before:
            after = list(self._parameters.values())
            torch._foreach_sub_(before, [local(p) for p in after])  # pyright: ignore[reportPrivateImportUsage]
            squares = complete_squares(tensor_norms(before).square(), after)
            self._measured[UPDATE_NORM] = squares.sum().sqrt()

    def _layer_norms(self) -> dict[str, Tensor]:
        names = [(layer, name) for layer, names in self._layers.items() for name in names]
        held = [(layer, self._parameters[name].grad) for layer, name in names]
        gradients = [(layer, grad) for layer, grad in held if grad is not None]
        if not gradients:
            return {}
        norms = tensor_norms([grad for _, grad in gradients]).unbind()
        by_layer: dict[str, list[Tensor]] = {}
        for (layer, _), norm in zip(gradients, norms, strict=True):
            by_layer.setdefault(layer, []).append(norm)
        return {
            f"{LAYER_GRAD_NORM}/{layer}": torch.linalg.vector_norm(torch.stack(own)) for layer, own in by_layer.items()
        }


def norms_of_stages(own: dict[str, float]) -> dict[str, float]:
    """Return a step's norms from those of pipeline ranks. Collective: all ranks call it, or none."""
    parts = gather_objects(own)
    joined = {name: value for part in parts for name, value in part.items() if name != UPDATE_NORM}
    if all(UPDATE_NORM in part for part in parts):  # which is not measured where there is no room for a copy
        joined[UPDATE_NORM] = math.hypot(*(part[UPDATE_NORM] for part in parts))
    return joined


def layers_of(parameters: dict[str, nn.Parameter]) -> dict[str, list[str]]:
    """Return the parameters of every layer that holds a matrix: a node of the topology, the embedder or the head."""
    found: dict[str, list[str]] = {}
    for name in parameters:
        match = _LAYER.match(name)
        layer = match.group(1).removeprefix("topology.") if match else name.split(".")[0]
        found.setdefault(layer, []).append(name)
    return {layer: names for layer, names in found.items() if any(parameters[name].ndim > 1 for name in names)}


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
