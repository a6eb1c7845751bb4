"""How far a student's residual stream is from its teacher's, block by block, in one forward of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from caramba.errors import ConfigError
from caramba.model import Model
from caramba.model.topology import ResidualTopology
from caramba.ops.backend import upcast


class ResidualDistance:
    """mean over residual blocks and tokens of |h_s - h_t|^2 / |h_t|^2, h being the stream after the block.

    Run forwards inside `watch()`; `value()` then compares them. Each token is normalised by its own norm, so that the
    few tokens of very large norm do not dominate.

    Raises:
        ConfigError: the models have another number of residual blocks.
    """

    def __init__(self, student: Model, teacher: Model) -> None:
        self.blocks = tuple(
            [block for block in model.modules() if isinstance(block, ResidualTopology)]
            for model in (student, teacher)
        )
        ours, theirs = (len(blocks) for blocks in self.blocks)
        if ours != theirs or not ours:
            raise ConfigError(
                f"hidden_weight: the student has {ours} residual blocks, the teacher {theirs}; both need the same "
                "number, at least one; remove hidden_weight"
            )
        self._streams: tuple[list[Tensor], list[Tensor]] = ([], [])

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Keep what the blocks give in the forwards that follow."""
        self._streams = ([], [])
        handles = [
            block.register_forward_hook(partial(_keep, stream))
            for blocks, stream in zip(self.blocks, self._streams, strict=True)
            for block in blocks
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def value(self, counted: Tensor | None = None) -> Tensor:
        """Return the distance, over the tokens `counted` bool [B, T] or all."""
        ours, theirs = self._streams
        self._streams = ([], [])
        distances = [_distance(mine, want, counted) for mine, want in zip(ours, theirs, strict=True)]
        return torch.stack(distances).mean()


def _distance(ours: Tensor, theirs: Tensor, counted: Tensor | None) -> Tensor:
    size = upcast(theirs).square().sum(-1)
    # A token of padding may be all zeros in both.
    each = (upcast(ours) - upcast(theirs)).square().sum(-1) / size.clamp_min(torch.finfo(size.dtype).tiny)
    if counted is None:
        return each.mean()
    return torch.where(counted, each, 0.0).sum() / counted.sum().clamp_min(1)


def _keep(stream: list[Tensor], _block: nn.Module, _inputs: Any, output: Tensor) -> None:
    stream.append(output)
