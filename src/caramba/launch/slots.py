"""Where the workers of `launcher=process` run: one slot each, with its device and its share of the cores."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from caramba.config.launcher import LauncherConfig
from caramba.errors import ConfigError
from caramba.runs.environment import SHARING


@dataclass(frozen=True)
class Slot:
    """A place for one worker at a time: `variables` is what its environment has besides ours."""

    name: str
    variables: Mapping[str, str]


def make_slots(config: LauncherConfig, n_points: int, device: str = "auto") -> list[Slot]:
    """Return the slots of a pool: one per GPU, or on a CPU one per core, unless `n_jobs` says otherwise.

    Workers beyond the number of devices share them in turn. Every worker gets an equal share of the cores, so that
    pools of threads do not fight for them.

    Raises:
        ConfigError: devices were named for a run on the CPU.
    """
    if config.devices is not None and device == "cpu":
        raise ConfigError(
            f"launcher.devices={list(config.devices)}: the runs ask for device=cpu; leave out one of the two"
        )
    devices = [str(item) for item in config.devices] if config.devices is not None else []
    if not devices and device in ("auto", "cuda"):
        devices = visible_gpus()
    cores = available_cores()
    n_slots = min(config.n_jobs or len(devices) or cores, max(1, n_points))
    threads = config.threads or max(1, cores // n_slots)
    sharing = -(-n_slots // max(len(devices), 1))
    slots: list[Slot] = []
    for number in range(n_slots):
        variables = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), SHARING: str(sharing)}
        if devices:
            variables["CUDA_VISIBLE_DEVICES"] = devices[number % len(devices)]
        place = f"GPU {variables['CUDA_VISIBLE_DEVICES']}" if devices else f"worker {number}"
        slots.append(Slot(place, variables))
    return slots


def visible_gpus() -> list[str]:
    """Return the GPUs that CUDA would see, as it names them, without loading torch: the driver's tool knows."""
    set_by_user = os.environ.get("CUDA_VISIBLE_DEVICES")
    if set_by_user is not None:
        return [name.strip() for name in set_by_user.split(",") if name.strip() not in ("", "-1")]
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):  # no driver here: no GPUs
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
