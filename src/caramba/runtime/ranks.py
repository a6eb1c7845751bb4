"""The processes of one run: how they meet, and how rank 0 tells the others what to do."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from caramba.config.parallel import ParallelConfig
from caramba.errors import CarambaError, ConfigError
from caramba.runtime.device import choose_device

MAX_PREFILL_DELAY_STEPS = timedelta(days=30)  # rank 0 may measure for hours between two phases
PARTING = timedelta(seconds=10)
COLLECTIVE = timedelta(minutes=30)
NO_MORE = "null"
"""The last order: no further phase follows."""
_meetings = itertools.count()


@dataclass
class Ranks:
    """The ranks of a run, joined. Orders go through the store that they met at, so rank 0 waits for nobody.

    Rank r reads the data as member r div (tp * pp) of dp: the ranks of a member are neighbours. With tp they are on one
    node; the stages of a pipeline may be on several.
    """

    rank: int
    size: int
    store: Any
    orders: int = 0
    is_training: bool = False
    """On rank 0: whether the other ranks run the last command, so that rank 0 cannot continue on its own."""

    def order(self, text: str | None) -> None:
        """Send the next order to all other ranks, as a JSON text; None ends them."""
        self.store.set(f"order/{self.orders}", (NO_MORE if text is None else text).encode())
        self.orders += 1
        self.is_training = text is not None

    def next_order(self) -> str | None:
        """Wait for rank 0's next order and return its JSON text, None at the end.

        Any process that reaches the store's port can write a command: the caller validates the text against a schema.

        Raises:
            CarambaError: the order is not UTF-8 text.
        """
        key = f"order/{self.orders}"
        self.store.wait([key], MAX_PREFILL_DELAY_STEPS)
        self.orders += 1
        try:
            text = self.store.get(key).decode()
        except UnicodeDecodeError:
            raise CarambaError(
                f"ranks: order {self.orders - 1} is not UTF-8 text, expected JSON from rank 0; start all ranks with "
                "one version of caramba"
            ) from None
        return None if text == NO_MORE else text

    def part(self) -> None:
        """End together: others say that they have heard, and rank 0, whose store it may be, waits for that a while."""
        if self.rank:
            self.store.set(f"parted/{self.rank}", b"")
            return
        self.order(None)
        with contextlib.suppress(
            dist.DistStoreError
        ):  # one of them hangs in a step that failed here, or has ended
            self.store.wait([f"parted/{rank}" for rank in range(1, self.size)], PARTING)


@contextlib.contextmanager
def join_ranks(parallel: ParallelConfig, device: str) -> Iterator[Ranks | None]:
    """Join the ranks that a launcher started (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), for a time.

    Each gets a device of its own, which is `cuda` from then on. Yields None for parallel=single, which joins nothing.

    Raises:
        ConfigError: another number of ranks than dp * tp * pp, or fewer devices than ranks of this node.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if parallel.strategy == "single":
        if world > 1:
            raise ConfigError(
                f"launcher: WORLD_SIZE={world}, and parallel=single is one process; add parallel=ddp or fsdp2, or "
                "start it without torchrun (unset RANK and WORLD_SIZE)"
            )
        yield None
        return
    check_world(parallel, world)
    chosen = _own_device(choose_device(device))
    is_cuda = chosen.type == "cuda"
    backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
    if world > 1:
        store, rank, world = next(rendezvous("env://", timeout=COLLECTIVE))
    else:
        store, rank = dist.HashStore(), 0  # pyright: ignore[reportPrivateImportUsage]
    # A launcher's store outlives a group and, in torchrun's agent, a restart: it keeps earlier messages.
    meeting = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_meetings)}"
    group_store = PrefixStore(f"group/{meeting}", store)
    dist.init_process_group(backend, store=group_store, rank=rank, world_size=world, timeout=COLLECTIVE)
    ranks = Ranks(rank, world, PrefixStore(f"orders/{meeting}", store))
    try:
        yield ranks
    except (
        BaseException
    ):  # others may hang in a step that failed here: the end of this process is what ends it
        with contextlib.suppress(dist.DistNetworkError):  # a store that has ended with its launcher
            ranks.part()
        raise
    ranks.part()
    dist.destroy_process_group()


def check_world(parallel: ParallelConfig, world: int) -> None:
    """Refuse a number of ranks that the manifest's sizes do not make.

    Raises:
        ConfigError: naming both, and what to start.
    """
    if parallel.ranks not in (None, world):
        raise ConfigError(
            f"parallel: {parallel.sizes} are {parallel.ranks} ranks, and the launcher started {world} (WORLD_SIZE); "
            f"start {parallel.ranks}, or " + ("change pp" if parallel.pp > 1 else "leave parallel.dp to auto")
        )
    if world % parallel.tp:
        raise ConfigError(
            f"parallel: tp={parallel.tp} does not divide the {world} ranks that were started; start a multiple of it"
        )


def _own_device(device: torch.device) -> torch.device:
    """Make this rank's GPU the current one."""
    place = int(os.environ.get("LOCAL_RANK", "0"))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    if device.type == "mps" and here > 1:
        raise ConfigError(
            f"parallel: {here} ranks, and device=mps is one device; use device=cpu, or one rank"
        )
    if device.type == "cuda":
        found = torch.cuda.device_count()
        if place >= found:
            raise ConfigError(
                f"parallel: {here} ranks on this node and {found} GPUs; start {found} here, or use device=cpu"
            )
        torch.cuda.set_device(place)
    return device
