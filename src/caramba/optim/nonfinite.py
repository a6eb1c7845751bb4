"""Handling of steps whose loss or gradient is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from caramba.config.train import PhaseConfig
from caramba.errors import CarambaError
from caramba.runs.events import append_event
from caramba.runs.files import write_json

NONFINITE = "nonfinite.json"
MOST_SKIPPED_IN_A_ROW = 20


@dataclass(frozen=True)
class _Seen:
    """Loss and norm of a step, copied to the host; readable after the event `is_here`."""

    step: int
    loss: Tensor
    norm: Tensor
    is_here: torch.cuda.Event | None

    def values(self) -> tuple[float, float]:
        if self.is_here is not None:
            self.is_here.synchronize()
        return float(self.loss), float(self.norm)


class NonFiniteWatch:
    """Check the loss and gradient norm of every optimiser step by the phase's `nonfinite`.

    `stop` writes the step, its loss and norm, and the windows of its batch to nonfinite.json, and raises. On a CUDA
    device it reads a step's values while the next step runs, to avoid synchronising; a save waits for them. `skip`
    synchronises at every step, skips the step and writes the event `step_skipped`. All ranks decide alike; one
    `writes`.
    """

    def __init__(
        self,
        phase: PhaseConfig,
        run_dir: Path,
        name: str,
        windows_of: Callable[[int], Sequence[int]],
        *,
        writes: bool = True,
    ) -> None:
        self.writes = writes
        self.phase, self.run_dir, self.name, self.windows_of = phase, run_dir, name, windows_of
        self.skipped, self._in_a_row = 0, 0
        self._unread: _Seen | None = None

    def allows(self, step: int, loss: Tensor, norm: Tensor) -> bool:
        """Return whether the weights may take optimiser step `step` (0-based).

        Raises:
            CarambaError: by `stop` at this step or the one before; by `skip` after twenty steps in a row.
        """
        self.flush()
        seen = _on_its_way(step, loss, norm)
        if self.phase.nonfinite == "stop" and seen.is_here is not None:
            self._unread = seen
            return True
        values = seen.values()
        if all(math.isfinite(value) for value in values):
            self._in_a_row = 0
            return True
        if self.phase.nonfinite == "stop":
            raise self._stop(step, *values)
        self.skipped, self._in_a_row = self.skipped + 1, self._in_a_row + 1
        if self.writes:
            append_event(self.run_dir, "step_skipped", **self._record(step, *values))
        if self._in_a_row == MOST_SKIPPED_IN_A_ROW:
            raise self._stop(step, *values, before=f"{self._in_a_row} steps in a row were skipped, and ")
        return False

    def flush(self) -> None:
        """Read the step that was not read yet.

        Raises:
            CarambaError: its loss or gradient is not finite.
        """
        seen, self._unread = self._unread, None
        if seen is not None:
            values = seen.values()
            if not all(math.isfinite(value) for value in values):
                raise self._stop(seen.step, *values)

    def state_dict(self) -> dict[str, int]:
        return {"skipped": self.skipped, "in_a_row": self._in_a_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.skipped, self._in_a_row = state["skipped"], state["in_a_row"]

    def _record(self, step: int, loss: float, norm: float) -> dict[str, object]:
        return {
            "phase": self.name,
            "step": step + 1,
            "loss": loss if math.isfinite(loss) else str(loss),
            "grad_norm": norm if math.isfinite(norm) else str(norm),
            "block_size": self.phase.block_size,
            "windows": list(self.windows_of(step)),
        }

    def _stop(self, step: int, loss: float, norm: float, before: str = "") -> CarambaError:
        path = self.run_dir / NONFINITE
        if self.writes:
            write_json(path, self._record(step, loss, norm))
        leave_out = ", or leave such steps out with nonfinite=skip" if self.phase.nonfinite == "stop" else ""
        return CarambaError(
            f"{self.name}: {before}the loss is {loss:g} and the gradient's norm {norm:g} at step {step + 1}; the "
            f"last saved state is as it was, and the windows of the batch are in {path}; lower lr (now "
            f"{self.phase.lr}), lengthen warmup_steps, lower max_grad_norm{leave_out}"
        )


def _on_its_way(step: int, loss: Tensor, norm: Tensor) -> _Seen:
    if not norm.is_cuda:
        return _Seen(step, loss.detach(), norm.detach(), None)
    copies = [value.detach().to("cpu", non_blocking=True) for value in (loss, norm)]
    is_here = torch.cuda.Event()
    is_here.record(torch.cuda.current_stream(norm.device))
    return _Seen(step, copies[0], copies[1], is_here)
