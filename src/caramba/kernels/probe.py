"""What `caramba doctor` asks of torch: versions, devices, backends, and the device's memory roofs in seconds."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

from caramba.errors import KernelUnavailable
from caramba.kernels import find_launcher, get_backend_info, load
from caramba.ops.backend import all_ops
from caramba.ops.formats import dequantize, quantize
from caramba.runtime.device import metal_facts

ROOF_BYTES = 2**30
REPEATS, CALLS = 20, 200


def probe() -> dict[str, Any]:
    """Return the facts of this machine's best device; its kernels are attached. Roofs are measured on CUDA alone."""
    cuda = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    mps = torch.backends.mps.is_available()
    device = "cuda" if cuda else "mps" if mps else "cpu"
    load(device)
    backends = get_backend_info(device)
    return {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "cuda": cuda,
        "cuda_version": torch.version.cuda,
        "mps": mps,
        "metal": metal_facts() | {"kernels": metal_kernels()},
        "driver": _driver() if cuda else None,
        "device": device,
        "nvrtc": backends["nvrtc"],
        "ops": backends["ops"],
        "call_us": host_cost(device) * 1e6,
        "roofs": memory_roofs() if cuda else {},
        "roof_bytes": ROOF_BYTES,
    }


def metal_kernels() -> dict[str, str]:
    """Return, for each op, whether it has a launcher for Metal, on whatever machine this is."""
    found = {}
    for name, op in all_ops().items():
        try:
            find_launcher(op, "metal")
        except KernelUnavailable:
            found[name] = "reference"
        else:
            found[name] = "metal"
    return found


@torch.inference_mode()
def host_cost(device: torch.device | str) -> float:
    """Return the seconds that the host spends on a call of an op, the least of some runs.

    On a CPU that holds the op's own work on one block as well.
    """
    codes, scales = quantize(torch.ones(1, 64, device=device), "q8_0")
    times = []
    for _ in range(5):
        _wait(device)
        began = time.perf_counter()
        for _ in range(CALLS):
            dequantize(codes, scales, "q8_0", 64)
        times.append((time.perf_counter() - began) / CALLS)
    _wait(device)
    return min(times)


@torch.inference_mode()
def memory_roofs() -> dict[str, float]:
    """Measure memory bandwidth on CUDA, GB/s (10^9 bytes): a copy (read and written bytes) and a read.

    Each is the best of several runs.
    """
    source = torch.ones(ROOF_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    total = torch.empty((), device="cuda")
    return {
        "copy": 2 * ROOF_BYTES / _least(lambda: target.copy_(source)) / 1e9,
        "read": ROOF_BYTES / _least(lambda: torch.sum(source, dim=0, out=total)) / 1e9,
    }


def _least(work: Callable[[], Any]) -> float:
    """Return the seconds of the fastest of several runs, by events on the device."""
    seconds = []
    for _ in range(REPEATS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work()
        ended.record()
        ended.synchronize()
        seconds.append(began.elapsed_time(ended) / 1e3)
    return min(seconds)


def _wait(device: torch.device | str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: nvidia-smi does not answer ({type(error).__name__})"
    return done.stdout.strip().splitlines()[0]
