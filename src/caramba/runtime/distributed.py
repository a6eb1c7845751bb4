"""Who this process is among the ranks of a run."""

from __future__ import annotations

import os

import torch.distributed as dist


def is_distributed() -> bool:
    """Return whether a process group of more than one rank is up."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def get_rank() -> int:
    """Return this process's rank; before a process group exists, the launcher's `RANK`, else 0."""
    return (
        dist.get_rank() if dist.is_available() and dist.is_initialized() else int(os.environ.get("RANK", "0"))
    )


def get_world_size() -> int:
    """Return the number of ranks; before a process group exists, the launcher's `WORLD_SIZE`, else 1."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Return whether this rank writes the run's files."""
    return get_rank() == 0
