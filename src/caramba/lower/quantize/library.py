"""torchao, loaded when a format is asked for, and the formats that it has no kernel for."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from types import ModuleType

import torch

from caramba.config.benchmark import WeightFormat
from caramba.errors import KernelUnavailable

INT4_CAPABILITY = (8, 0)
MISSING = (
    "torchao is not installed, whose products of quantised weights run here; pip install 'caramba[quantise]'"
)


def _is_installed() -> bool:
    return importlib.util.find_spec("torchao") is not None


def load_torchao() -> ModuleType:
    """Return `torchao.quantization`.

    Raises:
        KernelUnavailable: torchao is not installed.
    """
    if not _is_installed():
        raise KernelUnavailable(f"weights: {MISSING}")
    # Its start tells of extensions for other Python and CUDA builds, none of which are used here.
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return importlib.import_module("torchao.quantization")
    finally:
        logging.disable(before)


def format_refusal(form: WeightFormat, device: torch.device) -> str | None:
    """Return why weights of a format cannot run on a device, None where they can."""
    if not _is_installed():
        return f"weights={form}: {MISSING}"
    if device.type not in ("cpu", "cuda"):
        return f"weights={form}: torchao has no kernel for {device.type}; use device=cpu or cuda, or leave it out"
    return None


def refuse_packed_int4(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why torchao's packed int4 GEMM cannot run on a device with activations of a dtype, or None.

    Layers split over ranks use it.
    """
    if device.type != "cuda":
        return (
            f"weights=int4: torchao's packed 4-bit product of a shared layer needs a CUDA device, the model is on "
            f"{device.type}; use weights=int8"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < INT4_CAPABILITY:
        return f"weights=int4: needs compute capability 8.0, this device has {'.'.join(map(str, capability))}; use int8"
    if dtype is not torch.bfloat16:
        return (
            f"weights=int4: the 4-bit product takes bfloat16, the model is {str(dtype).removeprefix('torch.')}; "
            "use --dtype bf16"
        )
    return None
