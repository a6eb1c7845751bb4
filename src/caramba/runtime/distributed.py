"""Who this process is among the ranks of a run."""

from __future__ import annotations

import os

import torch.distributed as dist

from caramba.errors import ConfigError


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


def refuse_unconnected_ranks() -> None:
    """Check that ranks, when a launcher started several, can exchange what they compute.

    Raises:
        ConfigError: the environment names several ranks and no process group joins them: each would read its share of
            the data, train its share of the blocks, and never hear of the others'.
    """
    if get_world_size() > 1 and not is_distributed():
        raise ConfigError(
            f"launcher: WORLD_SIZE={get_world_size()} and no process group joins the ranks; a run from the command "
            "line is one process, so start it without torchrun (or unset RANK and WORLD_SIZE)"
        )
