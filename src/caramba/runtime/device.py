"""What this machine is: the device of a run, its facts, precision and memory, and the same random numbers again."""

import contextlib
import ctypes
import functools
import gc
import importlib.metadata
import os
import platform
import random
import re
import resource
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
    chip = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False)
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


STATUS = Path("/proc/self/status")
CGROUP = Path("/sys/fs/cgroup")
RESERVE = 128 * 2**20  # memory of a training process besides its tensors: loggers, the heaps of its threads
REFUSALS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "cannot allocate memory",
    "invalid buffer size",  # MPS, for more than its largest buffer
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
    # Only glibc keeps freed memory, and has a call that returns it.
    with contextlib.suppress(AttributeError, OSError):
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
        self._peak_key, self._level_key = ("VmHWM", "VmRSS") if address_limit() is None else ("VmPeak", "VmSize")

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


CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
# The sizes for which cuBLAS documents that its results repeat.
_REPEATABLE = (":4096:8", ":16:8")


def apply_determinism(is_deterministic: bool) -> None:
    """Allow only deterministic algorithms in this process, or any: an earlier run of the process may have set either.

    An operation without one raises instead of giving other bits in silence. cuBLAS reads its workspace setting when
    it is first used, so this comes before anything touches a GPU.

    Raises:
        ConfigError: the environment sets a cuBLAS workspace whose results do not repeat.
    """
    if is_deterministic:
        found = os.environ.setdefault(CUBLAS, _REPEATABLE[0])
        if found not in _REPEATABLE:
            raise ConfigError(
                f"deterministic=true: {CUBLAS}={found} in the environment does not repeat; unset it, or set it to "
                f"{' or '.join(_REPEATABLE)}"
            )
        torch.backends.cudnn.benchmark = False
    if torch.are_deterministic_algorithms_enabled() != is_deterministic:  # the call imports the compiler
        torch.use_deterministic_algorithms(is_deterministic)


def seed_process(seed: int, rank: int = 0) -> None:
    """Seed Python, NumPy and torch on every device: rank 0 with `seed`, others with a seed derived from it.

    Ranks share the data and the weights by other means; what they draw here (dropout) must differ. Workers of a data
    loader are seeded by torch from this state, each with another number.
    """
    own = seed if rank == 0 else int(np.random.SeedSequence([seed, rank]).generate_state(1, np.uint32)[0])
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)


def random_states(device: torch.device) -> dict[str, Any]:
    """Return torch's random state on the host, and on `device` where that is a GPU: other GPUs are other ranks'."""
    states: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Put back what `random_states` returned, on any machine; states of older runs list one for every GPU."""
    torch.set_rng_state(states["cpu"])
    if "cuda" not in states or device.type != "cuda":
        return
    saved = states["cuda"]
    if isinstance(saved, list | tuple):
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= len(saved):
            return  # none was saved for this GPU: it keeps its own
        saved = saved[index]
    torch.cuda.set_rng_state(saved, device)


LEAST_BYTES = 1 << 20  # smaller ones cost a copy each and hold nothing


@contextmanager
def activations_on_host(parameters: Iterable[Tensor], least_bytes: int = LEAST_BYTES) -> Iterator[None]:
    """Offload activations saved for backward to host memory, and copy them back on use.

    Host memory is pinned for a CUDA device. `parameters`, which stay on the device anyway, and tensors below
    `least_bytes` are not offloaded.

    Copies are queued in order with the computation, so nothing waits on the host's side and gradients are the same.
    """
    resident = {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        if tensor.nbytes < least_bytes or tensor.untyped_storage().data_ptr() in resident:
            return tensor
        # Strides stay as they are: compiled backwards rely on them.
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return tensor.device, host.copy_(tensor, non_blocking=True)

    def unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, host = packed
        return host.to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
