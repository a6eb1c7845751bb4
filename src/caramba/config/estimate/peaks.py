"""Dense peak arithmetic of GPUs, which MFU divides by: figures of the vendor's data sheets, without sparsity."""

from __future__ import annotations

from typing import Literal

Arithmetic = Literal["float32", "tf32", "float16", "bfloat16", "float8"]

# TFLOP/s. The first row whose words are all in the device's name holds, so a variant precedes its family.
# Data sheets of NVIDIA: H200 and H100 (SXM, NVL, PCIe), A100; half of what they state "with sparsity".
_PEAKS: tuple[tuple[tuple[str, ...], dict[str, float]], ...] = (
    (
        ("H200", "NVL"),
        {"float32": 60.0, "tf32": 417.5, "float16": 835.5, "bfloat16": 835.5, "float8": 1670.5},
    ),
    (("H200",), {"float32": 66.9, "tf32": 494.7, "float16": 989.4, "bfloat16": 989.4, "float8": 1978.9}),
    (
        ("H100", "NVL"),
        {"float32": 60.0, "tf32": 417.5, "float16": 835.5, "bfloat16": 835.5, "float8": 1670.5},
    ),
    (
        ("H100", "PCIe"),
        {"float32": 51.2, "tf32": 378.0, "float16": 756.0, "bfloat16": 756.0, "float8": 1513.0},
    ),
    (("H100",), {"float32": 66.9, "tf32": 494.7, "float16": 989.4, "bfloat16": 989.4, "float8": 1978.9}),
    (("A100",), {"float32": 19.5, "tf32": 156.0, "float16": 312.0, "bfloat16": 312.0}),
)


def peak_flops(device_name: str, arithmetic: Arithmetic) -> float | None:
    """Return the dense peak of a GPU in FLOP/s; None for a device or an arithmetic that the table lacks.

    A slice of a GPU (MIG) has a share of the peak that its name does not tell, so it has none here.
    """
    if "MIG" in device_name:
        return None
    for label, rates in _PEAKS:
        if all(word in device_name for word in label):
            return rates[arithmetic] * 1e12 if arithmetic in rates else None
    return None
