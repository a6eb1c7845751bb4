"""What the launches of kernels that store streams have in common: which tensors they take, and where each stream goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from caramba.kernels.triton.launch import Launch
from torch import Tensor

MOST_STREAMS = 3
"""Streams that a launch stores."""


@dataclass(frozen=True)
class StorePlan:
    """The launch for calls of one form, None if there is nothing to write.

    Of streams, buffers and what else is given it takes those at the places `order`; those at `copied` are made
    contiguous.
    """

    launch: Launch | None = None
    order: tuple[int, ...] = ()
    copied: tuple[int, ...] = ()

    def run(self, given: Sequence[Tensor]) -> None:
        """Launch on a call's tensors."""
        if self.copied:
            given = [x.contiguous() if i in self.copied else x for i, x in enumerate(given)]
        if self.launch is not None:
            self.launch(*[given[i] for i in self.order])


def columns_of(streams: Sequence[Tensor], buffers: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the buffer and the column in it of every stream: they fill the buffers in order, side by side, which the
    ops have checked."""
    found: list[tuple[int, int]] = []
    buffer = column = 0
    for x in streams:
        found.append((buffer, column))
        column += x.shape[-1]
        if column == buffers[buffer].shape[-1]:
            buffer, column = buffer + 1, 0
    return found


def along_width(x: Tensor) -> Tensor:
    """Return a stream with numbers of its width side by side, as a kernel reads it."""
    return x if x.stride(-1) == 1 else x.contiguous()
