"""Whether a run asks for more CPU threads than it may use: they take turns then, and every step is slower."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from caramba.config.manifest import Manifest

QUOTA = Path("/sys/fs/cgroup/cpu.max")


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_cores(quota: Path = QUOTA) -> int:
    """Return the cores that this process may use: those it is bound to, and no more than a container's quota."""
    cores = available_cores()
    try:
        limit, period = quota.read_text(encoding="ascii").split()[:2]
        return cores if limit == "max" else min(cores, max(1, math.ceil(int(limit) / int(period))))
    except (OSError, ValueError):  # no cgroup of version 2, so no quota that could be read
        return cores


def note_on_threads(manifest: Manifest, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a note when the workers of a run together have more threads than cores, None otherwise.

    Workers of a SLURM job run on other machines, and are not judged here.
    """
    launcher = manifest.launcher
    if launcher.is_slurm:
        return None
    cores, asked = usable_cores(), environment.get("OMP_NUM_THREADS", "")
    workers = 1
    if launcher.type == "torchrun":
        spread = manifest.parallel
        shared = spread.dp if isinstance(spread.dp, int) else 1
        workers = launcher.nproc_per_node or shared * spread.tp * spread.pp
    elif launcher.type == "process":
        workers = launcher.n_jobs or 1
    if workers > 1 or launcher.type != "inline":
        threads = launcher.threads or max(1, available_cores() // workers)
        key = "launcher.threads"
    else:
        threads = int(asked) if asked.isdecimal() and int(asked) else available_cores()
        key = "OMP_NUM_THREADS"
    if workers * threads <= cores:
        return None
    each = f"{workers} workers with {threads} threads each" if workers > 1 else f"{threads} threads"
    return f"{each} on {cores} usable cores are slower than one a core; set {key}={max(1, cores // workers)}"
