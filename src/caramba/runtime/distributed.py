"""Who this process is among the ranks of a run, and what they tell each other."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def is_joined() -> bool:
    """Return whether a process group is up, of one rank or more."""
    return dist.is_available() and dist.is_initialized()


def is_distributed() -> bool:
    """Return whether a process group of more than one rank is up."""
    return is_joined() and dist.get_world_size() > 1


def get_rank() -> int:
    """Return this process's rank; before a process group exists, the launcher's `RANK`, else 0."""
    return dist.get_rank() if is_joined() else int(os.environ.get("RANK", "0"))


def get_world_size() -> int:
    """Return the number of ranks; before a process group exists, the launcher's `WORLD_SIZE`, else 1."""
    return dist.get_world_size() if is_joined() else int(os.environ.get("WORLD_SIZE", "1"))


def get_local_world_size() -> int:
    """Return the number of ranks on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", get_world_size()))


def data_share(ranks_per_batch: int = 1) -> tuple[int, int]:
    """Return (which, of how many): the share of the data that this rank reads, as `ranks_per_batch` neighbours do."""
    if not is_joined():
        return 0, 1
    return get_rank() // ranks_per_batch, get_world_size() // ranks_per_batch


def is_main_process() -> bool:
    """Return whether this rank writes the run's files."""
    return get_rank() == 0


@torch.no_grad()
def mean_over_ranks(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the mean over all ranks of scalars that every rank has under the same names, in one exchange."""
    if not is_distributed() or not values:
        return dict(values)
    stacked = torch.stack([value.detach().float() for value in values.values()])
    dist.all_reduce(stacked)
    stacked /= get_world_size()
    return dict(zip(values, stacked.unbind(), strict=True))


def merge_over_ranks(values: Mapping[str, float]) -> dict[str, float]:
    """Return the mean of every number over the ranks that have it; every rank calls this, whatever names it has."""
    if not is_distributed():
        return dict(values)
    found: list[dict[str, float] | None] = [None] * get_world_size()
    dist.all_gather_object(found, dict(values))
    listed: dict[str, list[float]] = {}
    for part in found:
        for name, value in (part or {}).items():
            listed.setdefault(name, []).append(value)
    return {name: sum(each) / len(each) for name, each in listed.items()}


def gather_objects(value: Any) -> list[Any]:
    """Return the plain value of every rank, in their order."""
    if not is_distributed():
        return [value]
    found: list[Any] = [None] * get_world_size()
    dist.all_gather_object(found, value)
    return found


def gather_on_main(value: Any) -> list[Any] | None:
    """Return on rank 0 the plain value of every rank, in their order, and None on others; every rank calls this."""
    if not is_distributed():
        return [value]
    found: list[Any] | None = [None] * get_world_size() if is_main_process() else None
    dist.gather_object(value, found, dst=0)
    return found


def all_agree(flag: bool, device: torch.device) -> bool:
    """Return whether `flag` holds on every rank."""
    if not is_distributed():
        return flag
    votes = torch.tensor(float(flag), device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes)


@torch.no_grad()
def send_from_main(tensors: Iterable[Tensor]) -> None:
    """Put rank 0's values into the tensors of every rank."""
    if is_distributed():
        for tensor in tensors:
            dist.broadcast(tensor, src=0)
