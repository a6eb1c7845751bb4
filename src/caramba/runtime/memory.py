"""Memory of a device: free bytes, the peak of a piece of work, and the out-of-memory error."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
CGROUP = Path("/sys/fs/cgroup")
RESERVE = 128 * 2**20  # memory of a training process besides its tensors: loggers, the heaps of its threads
REFUSALS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "cannot allocate memory",
    "status_alloc_failed",  # cuBLAS and cuDNN, whose own memory is not of the allocator
)


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error means out of memory: on the GPU, or at the process's limit on the CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(word in str(error).lower() for word in REFUSALS)


def release_memory() -> None:
    """Return to the device, and to the system, what no tensor holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
    with contextlib.suppress(
        AttributeError, OSError
    ):  # only glibc keeps freed memory, and has a call that returns it
        ctypes.CDLL(None).malloc_trim(0)


def free_bytes(device: torch.device, sharers: int = 1) -> int:
    """Return the bytes that this process can still take: on a CPU the least of what the machine has available, the
    control group's limit and the process's own (`ulimit -v`).

    `sharers` processes, this one included, share the device evenly; a limit of its own a process has to itself.
    """
    if device.type == "cuda":
        return (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)) // sharers
    if device.type == "mps":
        return (torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()) // sharers
    room = [_available() // sharers]
    if (limit := address_limit()) is not None:
        room.append(limit - _status("VmSize"))
    with contextlib.suppress(OSError, ValueError):  # no control group, or one without a limit ("max")
        most = int((CGROUP / "memory.max").read_text())
        room.append((most - int((CGROUP / "memory.current").read_text())) // sharers)
    return max(0, min(room) - RESERVE)


def address_limit() -> int | None:
    """Return the limit of this process's address space in bytes, None without one."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


class MemoryMeter:
    """Peak memory of this process on a device since `start`; on a CPU, above the memory at `start`.

    On a GPU it is all that the allocator reserved, on a CPU the growth of resident memory, or of the address space
    where that is what is limited. What the heap kept of work before counts: a meter that is started again keeps the
    lowest level that it has seen.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._level: int | None = None
        self._peak_key, self._level_key = (
            ("VmHWM", "VmRSS") if address_limit() is None else ("VmPeak", "VmSize")
        )

    def start(self) -> None:
        """Forget the peaks so far."""
        release_memory()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.device.type == "cpu" and STATUS.is_file():
            with contextlib.suppress(OSError):  # a kernel that does not let a process reset its own
                Path("/proc/self/clear_refs").write_text("5")
            now = _status(self._level_key)
            self._level = now if self._level is None else min(now, self._level)

    def peak_bytes(self) -> int:
        """Return the peak since `start`."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self.device)
        if self.device.type == "mps":
            return torch.mps.driver_allocated_memory()
        return max(0, _status(self._peak_key) - (self._level or 0))


def _status(key: str) -> int:
    """Return a size of this process in bytes, from the kernel; without /proc its largest resident size so far."""
    if not STATUS.is_file():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def _available() -> int:
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024
