"""Which precision a phase computes and keeps its weights in, on a device that has it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from caramba.config.train import CPU_PRECISIONS, PhaseConfig, check_precision, dtype_of

AMPERE, ADA, HOPPER = (8, 0), (8, 9), (9, 0)


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
        return ("float32", "bfloat16")
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
