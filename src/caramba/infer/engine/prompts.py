"""Whole prompts in forwards of a few fixed shapes, which a CUDA device replays without the host."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from caramba.cache import Context
from caramba.config.kvcache import KVCacheKind
from caramba.infer.device_steps import Captured, captured, replayed
from caramba.layer import unplanned_attention
from caramba.layer.rope import tables_of
from caramba.model import Model

NARROWEST = 64
"""Tokens of the narrowest row: attention on fewer takes as long."""
FEWEST = 256
"""Tokens of the smallest forward: with fewer, reading the weights takes longer than the products."""
MOST = 2048
"""Tokens of the largest forward: with more, the device works longer on its kernels than the host launches them."""
WHOLE = 512
"""Tokens up to which a prompt runs whole, whatever the chunk: launching a part of it takes longer than running all."""
Shape = tuple[int, int]
"""Rows and tokens of a row."""


def shapes_of(chunk: int, n_slots: int, max_len: int) -> list[Shape]:
    """Return the shapes of forwards of up to `chunk` tokens, those of fewest tokens first, narrow ones before wide.

    Tokens double from `FEWEST` up to the chunk or `MOST`, and so do the widths of rows, from `NARROWEST` up to all of
    a forward's tokens or a slot's: padding at most doubles what a forward or a row runs. Below a chunk of `WHOLE` there
    are rows of more tokens, one alone.
    """
    shapes = {
        (min(n_tokens // width, n_slots), width)
        for n_tokens in _doubled(FEWEST, min(chunk, MOST))
        for width in _doubled(NARROWEST, min(n_tokens, max_len))
    }
    shapes |= {(1, width) for width in _doubled(NARROWEST, min(WHOLE, max_len)) if width > chunk}
    return sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape[1]))


def _doubled(first: int, last: int) -> Iterator[int]:
    """Yield first, twice that and so on while it is below `last`, and then `last`."""
    while first < last:
        yield first
        first *= 2
    yield last


class PromptForwards:
    """Forwards over whole prompts of empty slots, padded on the right where nothing attends to it.

    Rows of a shape that no prompt takes repeat the last one that is there, and write what it writes. With
    `is_captured` every shape is a CUDA graph. The first prompt makes them all, so no later one waits for it, and they
    share their memory, all but the staged caches, which are there from the beginning. Prompts of any lengths then cost
    a copy and a replay.

    Attributes:
        shapes: rows and tokens of a row, those of fewest tokens first.
        captures: graphs that have been made.
    """

    def __init__(
        self, model: Model, ctx: Context, kind: KVCacheKind, shapes: Sequence[Shape], *, is_captured: bool
    ) -> None:
        self.model, self.ctx = model, ctx
        self.shapes, self.is_captured = tuple(shapes), is_captured
        self.captures = 0
        self._device = model.embedder.token.weight.device
        # Where each shape's keys and values are written before they go to their slots. They are made here, so that what
        # an engine holds is known when it starts, and not among what the runs before a capture allocate on a stream of
        # their own.
        self._staged = {shape: model.new_context(*shape, kind, static=True) for shape in self.shapes}
        self._graphs: dict[Shape, Captured] = {}
        self._tables: list[object] = []

    @property
    def widest(self) -> int:
        """Tokens of the longest prompt that a shape takes."""
        return max(width for _, width in self.shapes)

    @property
    def nbytes(self) -> int:
        """Bytes of the staged caches."""
        return sum(staged.nbytes() for staged in self._staged.values())

    def shape_for(self, n_prompts: int, longest: int, most: int) -> Shape | None:
        """Return the shape of fewest tokens, at most `most` of them, that so many prompts fit."""
        for rows, width in self.shapes:
            if n_prompts <= rows and longest <= width and rows * width <= most:
                return rows, width
        return None

    def run(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """Fill slots with prompts, which a shape takes, and return the logits after each, [n, V].

        The next call overwrites them.
        """
        shape = self.shape_for(len(prompts), max(map(len, prompts)), MOST)
        assert shape is not None
        n_rows, width = shape
        rows = [
            [slot, len(prompt) - 1, *prompt, *[0] * (width - len(prompt))]
            for slot, prompt in zip(slots, prompts, strict=True)
        ]
        rows += rows[-1:] * (n_rows - len(rows))
        given = torch.tensor(rows).to(self._device, non_blocking=True)
        if not self.is_captured:
            return self._forward(shape, given)[: len(slots)]
        self.capture(slots[0])
        return replayed(self._graphs[shape], given)[: len(slots)]

    def forget(self) -> None:
        """Drop the graphs: the weights that they read have moved."""
        self._graphs.clear()
        self._tables.clear()

    def capture(self, slot: int) -> None:
        """Make the graphs of all shapes where there are none, filling a slot with nothing of worth.

        Raises:
            RuntimeError: the device's, for want of memory or of anything else; there are then no graphs.
        """
        if self._graphs or not self.is_captured:
            return
        # Longer tables of angles may take the place of these, which the graphs go on reading.
        self._tables = tables_of(self.model)
        graphs: dict[Shape, Captured] = {}
        pool = torch.cuda.graph_pool_handle()
        for shape in self.shapes:
            given = torch.zeros(shape[0], 2 + shape[1], dtype=torch.int64, device=self._device)
            given[:, 0] = slot
            run = functools.partial(self._forward, shape)
            graphs[shape] = captured(given, run, run, pool)
            self.captures += 1
        self._graphs = graphs

    def _forward(self, shape: Shape, given: Tensor) -> Tensor:
        """Run rows of a slot, the place of the last token, and tokens, [n, 2 + T], to logits [n, V]."""
        slots, last, tokens = given[:, 0], given[:, 1], given[:, 2:]
        staged = self._staged[shape]
        staged.truncate(0)
        return fill_slots(self.model, self.ctx, staged, slots, last, tokens)


def fill_slots(
    model: Model, ctx: Context, staged: Context, slots: Tensor, last: Tensor, tokens: Tensor
) -> Tensor:
    """Run prompts, padded on the right, over empty staged caches of their width, copy what these hold into slots of
    `ctx`, and return the logits after each prompt.

    Shape: slots and the places of last tokens [n], tokens [n, T], int64, to [n, V].
    """
    width = tokens.shape[1]
    with unplanned_attention(tokens.device, tokens.numel() * width):
        hidden = model.hidden(tokens, staged)
    for cache, part in zip(ctx.caches, staged.caches, strict=True):
        for into, values in zip(cache.allocations, part.allocations, strict=True):
            into[:, :, :width].index_copy_(0, slots, values)
    return model.logits(hidden[torch.arange(len(last), device=last.device), last])
