"""Blocks spread over ranks: each rank trains its own, and at the end every rank has all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from caramba.errors import ConfigError
from caramba.runtime import get_rank, get_world_size, is_distributed


class BlockShard:
    """The blocks of one rank: consecutive ones, so that the teacher of an early rank stops early; all, of one rank.

    Where `is_shared` a rank computes no gradient of another's blocks, so no gradient is ever reduced; `gather` sends
    every block's weights from its owner to all.

    Raises:
        ConfigError: more ranks than blocks.
    """

    def __init__(self, names: Sequence[str], rank: int | None = None, world_size: int | None = None) -> None:
        self.names = tuple(names)
        world = get_world_size() if world_size is None else world_size
        if world > len(self.names):
            raise ConfigError(
                f"blockwise: {world} ranks for {len(self.names)} blocks; use at most one rank per block"
            )
        share, rest = divmod(len(self.names), world)
        sizes = [share + (place < rest) for place in range(world)]
        self._owner = dict(
            zip(self.names, (place for place, n in enumerate(sizes) for _ in range(n)), strict=True)
        )
        mine = get_rank() if rank is None else rank
        self.is_shared = world > 1
        self.owned = tuple(name for name in self.names if self._owner[name] == mine)

    @torch.no_grad()
    def gather(self, layers: Mapping[str, nn.Module]) -> None:
        """Give every rank the weights of all blocks, each from its owner; without a process group do nothing."""
        if not is_distributed():
            return
        for name in self.names:
            for tensor in layers[name].state_dict().values():
                dist.broadcast(tensor, src=self._owner[name])
