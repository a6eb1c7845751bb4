"""Processes of a test that are the ranks of one group."""

from __future__ import annotations

from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from caramba.runs.exit_codes import end_now


def meet(rank: int, folder: str, ranks: int, timeout: timedelta) -> None:
    """Join the group of `ranks` processes that meet in a folder, over gloo, with one thread each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks, timeout=timeout)


def leave_together() -> NoReturn:
    """End this process, which has done its part, when all others have."""
    dist.barrier()
    dist.destroy_process_group()
    end_now(0)
