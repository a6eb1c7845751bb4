"""The peak that a phase's MFU is a share of."""

from __future__ import annotations

import torch

from caramba.config.estimate.peaks import Arithmetic, peak_flops

_ARITHMETIC: dict[str, Arithmetic] = {"float16": "float16", "bfloat16": "bfloat16"}


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
