"""Checks of a phase that need neither torch nor a device: precision on the CPU, steps of blocks, an open batch."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection

from caramba.config.train import PhaseConfig
from caramba.errors import ConfigError

CPU_PRECISIONS = ("float32", "bfloat16", "float16")


def dtype_of(phase: PhaseConfig, device_type: str, supported: Collection[str]) -> tuple[str, str]:
    """Return the dtype that a phase computes in on a device, and the reason.

    Args:
        phase: its dtype, use_amp and amp_dtype decide, `auto` by the device.
        device_type: `cpu`, `cuda` or `mps`.
        supported: the precisions that the device has.
    """
    if phase.use_amp is False:
        kept = "bfloat16" if phase.has_16_bit_weights else "float32"
        return kept, f"the manifest: use_amp=false{', dtype=bfloat16' if phase.has_16_bit_weights else ''}"
    if phase.use_amp is True:
        asked = next((name for name in (phase.amp_dtype, phase.dtype) if name.endswith("16")), "bfloat16")
        return asked, f"the manifest: use_amp=true{'' if asked == 'bfloat16' else f', {asked}'}"
    if phase.dtype != "auto":
        return phase.dtype, f"the manifest: dtype={phase.dtype}"
    if phase.amp_dtype != "auto" and device_type == "cuda":
        return phase.amp_dtype, f"the manifest: amp_dtype={phase.amp_dtype}"
    if device_type != "cuda":
        return "float32", f"auto: float32 on {device_type}, where 16 bits are not faster everywhere"
    if "bfloat16" not in supported:
        return "float32", "auto: this GPU has no bfloat16"
    return "bfloat16", "auto: bfloat16 on a GPU that has it"


def check_precision(
    phase: PhaseConfig, device_type: str, device_name: str, supported: Collection[str]
) -> None:
    """Check that a device has the precisions that a phase asks for.

    Raises:
        ConfigError: the device lacks one, naming what it has; or torchao is missing, for float8.
    """
    dtype, _ = dtype_of(phase, device_type, supported)
    wanted = {f"dtype={dtype}": dtype, "tf32=true": "tf32" if phase.tf32 else dtype}
    if phase.float8 != "none":
        wanted[f"float8={phase.float8}"] = "float8"
    for setting, name in wanted.items():
        if name not in supported:
            key = setting.partition("=")[0]
            fix = "choose one of them" if key == "dtype" else f"remove {key}"
            raise ConfigError(f"train.{setting}: {device_name} supports {', '.join(supported)}; {fix}")
    if phase.float8 != "none" and importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"train.float8={phase.float8} needs torchao, which is not installed: pip install torchao"
        )
    for key in ("activation_offload", "optimizer_offload"):
        if device_type == "cpu" and getattr(phase, key):
            raise ConfigError(f"train.{key}: on the device cpu all is in the host's memory; remove it")


def check_cpu_precision(phase: PhaseConfig) -> None:
    """Check that the CPU has what a phase asks for, as `check_precision` does.

    Raises:
        ConfigError: naming the setting and what the CPU has.
    """
    check_precision(phase, "cpu", "the device cpu", CPU_PRECISIONS)


def check_batch_is_given(run_id: str, phase: PhaseConfig) -> None:
    """Check that a phase whose plan is off has a batch size.

    Raises:
        ConfigError: its batch size is `auto`.
    """
    if phase.batch_size == "auto":
        raise ConfigError(
            f"run {run_id!r}: batch_size=auto is found by measurement, which plan=off forbids; give a number"
        )


def check_block_steps(n_blocks: int, steps: int) -> None:
    """Check that a phase which trains `n_blocks` blocks in turn has a step for each.

    Raises:
        ConfigError: fewer steps than blocks.
    """
    if steps < n_blocks:
        raise ConfigError(
            f"schedule=sequential trains {n_blocks} blocks in turn, got steps={steps}; "
            f"use steps={n_blocks} or more, or schedule=concurrent"
        )
