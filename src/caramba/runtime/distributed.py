"""The processes of one run: how they meet, who this one is among them, and what they tell each other."""

import contextlib
import io
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from caramba.config.parallel import ParallelConfig
from caramba.errors import CarambaError, ConfigError
from caramba.runtime.device import choose_device


class SignalAgreement:
    """The largest number that any rank has set, known to all ranks at the same step.

    Ranks receive a signal at different steps, and one that saved and exited on its own would leave the others waiting.
    The ranks' numbers at a step are reduced over a separate group, on the host, while the next step runs, and read
    after it: all ranks read the same number, and no device waits for it.
    """

    def __init__(self) -> None:
        self._group: Any = dist.new_group(backend="gloo") if is_distributed() else None
        self._said = torch.zeros(1, dtype=torch.int64)
        self._pending: dist.Work | None = None

    def largest(self, mine: int) -> int:
        """Say this rank's number; return the largest one: of a single process now, of several that of a step ago.

        Every rank calls this equally often.
        """
        if self._group is None:
            return mine
        found = 0
        if self._pending is not None:
            self._pending.wait()
            found = int(self._said.item())
        self._said.fill_(mine)
        self._pending = dist.all_reduce(self._said, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return found

    def close(self) -> None:
        """Wait for the pending reduction, and leave the group."""
        if self._group is not None:
            if self._pending is not None:
                self._pending.wait()
            dist.destroy_process_group(self._group)
            self._group = self._pending = None


def is_process_group_up() -> bool:
    """Return whether a process group is up, of one rank or more."""
    return dist.is_available() and dist.is_initialized()


def is_distributed() -> bool:
    """Return whether a process group of more than one rank is up."""
    return is_process_group_up() and dist.get_world_size() > 1


def get_rank() -> int:
    """Return this process's rank; before a process group exists, the launcher's `RANK`, else 0."""
    return dist.get_rank() if is_process_group_up() else int(os.environ.get("RANK", "0"))


def get_world_size() -> int:
    """Return the number of ranks; before a process group exists, the launcher's `WORLD_SIZE`, else 1."""
    return dist.get_world_size() if is_process_group_up() else int(os.environ.get("WORLD_SIZE", "1"))


def get_local_world_size() -> int:
    """Return the number of ranks on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", get_world_size()))


def data_share(ranks_per_batch: int = 1) -> tuple[int, int]:
    """Return (which, of how many): the share of the data that this rank reads, as `ranks_per_batch` neighbours do."""
    if not is_process_group_up():
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
    listed: dict[str, list[float]] = {}
    for part in gather_objects({name: float(value) for name, value in values.items()}):
        for name, value in part.items():
            listed.setdefault(name, []).append(value)
    return {name: sum(each) / len(each) for name, each in listed.items()}


def gather_objects(value: Any) -> list[Any]:
    """Return every rank's value, a JSON value, in the order of the ranks; every rank calls this."""
    if not is_distributed():
        return [value]
    return [json.loads(part) for part in _gather_bytes(json.dumps(value).encode()) or ()]


def gather_on_main(value: Any) -> list[Any] | None:
    """Return on rank 0 every rank's value in their order, and None on others; every rank calls this.

    The value holds plain types and CPU tensors. It is sent as a torch file and read with `weights_only`: a message
    between ranks runs no code.
    """
    if not is_distributed():
        return [value]
    buffer = io.BytesIO()
    torch.save(value, buffer)
    parts = _gather_bytes(buffer.getvalue(), to_main=True)
    return None if parts is None else [torch.load(io.BytesIO(part), weights_only=True) for part in parts]


def _gather_bytes(own: bytes, *, to_main: bool = False) -> list[bytes] | None:
    """Return the bytes of every rank, with `to_main` on rank 0 alone and None on the others."""
    n_ranks = get_world_size()
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(n_ranks)]
    dist.all_gather(lengths, torch.tensor([len(own)]))
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    parts = None
    if not to_main or is_main_process():
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(n_ranks)]
    if to_main:
        dist.gather(padded, parts, dst=0)
    else:
        assert parts is not None
        dist.all_gather(parts, padded)
    if parts is None:
        return None
    return [part[: int(n)].numpy().tobytes() for part, n in zip(parts, lengths, strict=True)]


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
        # One of them hangs in a step that failed here, or has ended.
        with contextlib.suppress(dist.DistStoreError):
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
    except BaseException:  # others may hang in a step that failed here: the end of this process is what ends it
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
    place = int(os.environ.get("LOCAL_RANK", "0"))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    if device.type == "mps" and here > 1:
        raise ConfigError(f"parallel: {here} ranks, and device=mps is one device; use device=cpu, or one rank")
    if device.type == "cuda":
        found = torch.cuda.device_count()
        if place >= found:
            raise ConfigError(
                f"parallel: {here} ranks on this node and {found} GPUs; start {found} here, or use device=cpu"
            )
        torch.cuda.set_device(place)
    return device
