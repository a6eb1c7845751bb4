"""Which precision a phase computes and keeps its weights in, on a device that has it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from caramba.config.train import PhaseConfig
from caramba.errors import ConfigError

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
    dtype, reason = _dtype(phase, device)
    have = device_precisions(device)
    wanted = {f"dtype={dtype}": dtype, "tf32=true": "tf32" if phase.tf32 else dtype}
    if phase.float8 != "none":
        wanted[f"float8={phase.float8}"] = "float8"
    for setting, name in wanted.items():
        if name not in have:
            key = setting.partition("=")[0]
            fix = "choose one of them" if key == "dtype" else f"remove {key}"
            raise ConfigError(f"train.{setting}: {_name(device)} supports {', '.join(have)}; {fix}")
    if phase.float8 != "none" and importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"train.float8={phase.float8} needs torchao, which is not installed: pip install torchao"
        )
    for key in ("activation_offload", "optimizer_offload"):
        if device.type == "cpu" and getattr(phase, key):
            raise ConfigError(f"train.{key}: on the device cpu all is in the host's memory; remove it")
    if phase.has_16_bit_weights:
        return Precision(dtype, reason, "bfloat16", "bf16-true")
    mode = {"float32": "32-true", "bfloat16": "bf16-mixed", "float16": "16-mixed"}[dtype]
    return Precision(dtype, reason, "float32", mode)


def device_precisions(device: torch.device) -> tuple[str, ...]:
    """Return what a phase can train in on a device: float32, tf32, bfloat16, float16, float8."""
    if device.type == "cpu":
        return ("float32", "bfloat16", "float16")
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


def _dtype(phase: PhaseConfig, device: torch.device) -> tuple[str, str]:
    if phase.use_amp is False:
        kept = "bfloat16" if phase.has_16_bit_weights else "float32"
        return kept, f"the manifest: use_amp=false{', dtype=bfloat16' if phase.has_16_bit_weights else ''}"
    if phase.use_amp is True:
        asked = next((name for name in (phase.amp_dtype, phase.dtype) if name.endswith("16")), "bfloat16")
        return asked, f"the manifest: use_amp=true{'' if asked == 'bfloat16' else f', {asked}'}"
    if phase.dtype != "auto":
        return phase.dtype, f"the manifest: dtype={phase.dtype}"
    if phase.amp_dtype != "auto" and device.type == "cuda":
        return phase.amp_dtype, f"the manifest: amp_dtype={phase.amp_dtype}"
    if device.type != "cuda":
        return "float32", f"auto: float32 on {device.type}, where 16 bits are not faster everywhere"
    if "bfloat16" not in device_precisions(device):
        return "float32", "auto: this GPU has no bfloat16"
    return "bfloat16", "auto: bfloat16 on a GPU that has it"


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"the device {device.type}"
