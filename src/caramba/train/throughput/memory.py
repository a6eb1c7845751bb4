"""How much memory a phase takes, by the allocator's own counts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from caramba.runtime import free_bytes

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
