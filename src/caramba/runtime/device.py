"""What this machine is: the device of a run, its facts, and the precision of a phase on it."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from caramba.config.train import CPU_PRECISIONS, PhaseConfig, check_precision, dtype_of
from caramba.errors import ConfigError

DRIVER = Path("/proc/driver/nvidia/version")
AMPERE, ADA, HOPPER = (8, 0), (8, 9), (9, 0)
CUDNN_9_1 = 90100
BF16_ERROR = 0.02
"""Of a product of normal numbers in bfloat16, over its largest element: many times that of a right one."""


def choose_device(wanted: str) -> torch.device:
    """Return the device that `auto`, `cpu`, `cuda` or `mps` selects here.

    Raises:
        ConfigError: the device that was asked for by name is not available.
    """
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if wanted == "auto":
        wanted = next(name for name in ("cuda", "mps", "cpu") if available[name])
    if not available[wanted]:
        have = ", ".join(name for name, present in available.items() if present)
        raise ConfigError(f"device: {wanted!r} is not available here; have: {have}; use device=auto")
    return torch.device(wanted)


def check_gpu(device: torch.device, wanted: str | None) -> None:
    """Hold the device against `settings.gpu`, which a profile such as device=cuda_h200 sets.

    Raises:
        ConfigError: it is no GPU with that word in its name.
    """
    if wanted is None:
        return
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else f"the device {device.type}"
    # As a whole word: a GH200 is no H200, and an A100 no A10.
    if not is_gpu or re.search(rf"\b{re.escape(wanted)}\b", name, re.IGNORECASE) is None:
        raise ConfigError(
            f"settings.gpu={wanted}: the run is for that GPU, and this is {name}; use device=auto or device=cuda"
        )


def device_facts(device: torch.device) -> dict[str, Any]:
    """Return name, driver, versions and sizes of `device`; the part of a plan's signature that is the machine."""
    facts: dict[str, Any] = {
        "device": device.type,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "driver": _driver(),
        }
    else:
        facts["name"] = platform.processor() or platform.machine()
        if device.type == "mps":
            facts |= metal_facts()
            del facts["allocated_bytes"]  # changes during a run
    return facts


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Return the version line of NVIDIA's kernel module, None where it is not loaded."""
    return DRIVER.read_text().splitlines()[0].strip() if DRIVER.is_file() else None


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was queued; a clock read before this measures the queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@functools.cache
def agrees_in_bfloat16(device: torch.device) -> bool:
    """Whether a product in bfloat16 is that in float32 on this device: Apple's chips and macOS differ in that."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=generator).to(device) for _ in range(2))
    try:
        found = (a.to(torch.bfloat16) @ b.to(torch.bfloat16)).float()
    except (RuntimeError, TypeError):  # this macOS has no bfloat16
        return False
    expected = a @ b
    return bool((found - expected).abs().max() <= BF16_ERROR * expected.abs().max())


def inference_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that unquantised weights take for inference where none was asked for; None: as they are.

    On MPS 16 bits: bfloat16 if a product agrees with float32 there, else float16.
    """
    if device.type != "mps":
        return None
    return torch.bfloat16 if agrees_in_bfloat16(device) else torch.float16


def metal_facts() -> dict[str, Any]:
    """Return Apple's chip, macOS, bytes of the GPU's memory, bfloat16 and the variable that lets operators run on the
    CPU.

    The variable is reported, never set.
    """
    fallback = os.environ.get("PYTORCH_ENABLE_MPS_FALLBACK")
    facts: dict[str, Any] = {"fallback": fallback, "chip": None, "macos": platform.mac_ver()[0] or None}
    if not torch.backends.mps.is_available():
        return facts
    chip = subprocess.run(
        ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
    )
    return facts | {
        "chip": chip.stdout.strip() or platform.machine(),
        "recommended_bytes": torch.mps.recommended_max_memory(),
        "allocated_bytes": torch.mps.driver_allocated_memory(),
        "bfloat16": agrees_in_bfloat16(torch.device("mps")),
    }


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating type of a device: MPS has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def prefers_cudnn(device: torch.device) -> bool:
    """Whether cuDNN's attention leads: on Hopper and later, where it took 0.5 to 0.7 of flash's time for forward and
    backward in 16 bits (docs/benchmarks/attention_backends.json), and takes keys and values of two widths as they are.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    version = torch.backends.cudnn.version()
    return torch.cuda.get_device_capability(device) >= HOPPER and version is not None and version >= CUDNN_9_1


@dataclass(frozen=True)
class Precision:
    """What matrix products are computed in (`dtype`, and why), what weights are kept in, and the mode's usual name."""

    dtype: str
    reason: str
    weights: str
    mode: str

    @property
    def keeps(self) -> str:
        """Say what is kept in which precision."""
        return {
            "32-true": "all in float32",
            "bf16-mixed": "autocast over float32 weights; a frozen teacher is stored in bfloat16",
            "16-mixed": "autocast over float32 weights, the loss scaled; a frozen teacher is stored in float16",
            "bf16-true": "weights and gradients in bfloat16",
        }[self.mode]


def choose_precision(phase: PhaseConfig, device: torch.device) -> Precision:
    """Decide a phase's precision from its dtype, use_amp and amp_dtype.

    `auto` is bfloat16 under autocast on a GPU that has it. Nothing is measured: bfloat16 has float32's range, so it
    needs no loss scaling, and tensor cores compute it several times faster.

    Raises:
        ConfigError: the device lacks what was asked for, naming what it has; or torchao is missing, for float8.
    """
    have = device_precisions(device)
    check_precision(phase, device.type, _name(device), have)
    dtype, reason = dtype_of(phase, device.type, have)
    if phase.has_16_bit_weights:
        return Precision(dtype, reason, "bfloat16", "bf16-true")
    mode = {"float32": "32-true", "bfloat16": "bf16-mixed", "float16": "16-mixed"}[dtype]
    return Precision(dtype, reason, "float32", mode)


def device_precisions(device: torch.device) -> tuple[str, ...]:
    """Return what a phase can train in on a device: float32, tf32, bfloat16, float16, float8."""
    if device.type == "cpu":
        return CPU_PRECISIONS
    if device.type != "cuda":  # float16 needs a loss that is scaled, which torch does on CUDA and the CPU
        return ("float32", "bfloat16") if device.type != "mps" or agrees_in_bfloat16(device) else ("float32",)
    capability = torch.cuda.get_device_capability(device)
    has = {
        "float32": True,
        "tf32": capability >= AMPERE and torch.version.hip is None,
        "bfloat16": torch.cuda.is_bf16_supported(including_emulation=False),
        "float16": True,
        "float8": capability >= HOPPER and torch.version.hip is None,
    }
    return tuple(name for name, present in has.items() if present)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"the device {device.type}"
