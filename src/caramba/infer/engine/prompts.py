"""Whole prompts, packed into one row of tokens, in forwards of a few sizes, which a CUDA device replays without the
host."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from caramba.cache import Context
from caramba.infer.device_steps import CAPTURING, WARM_UPS, warm_up
from caramba.infer.engine.upload import stage
from caramba.layer import StoredDocuments, packed_attention, shared_angles
from caramba.model import Model


@dataclass
class ChunkedGraph:
    """Graphs of a computation in their order, with its own input and, after the last of them, its output.

    What one leaves for the next is in their pool: until the last has run, no other graph of that pool may.
    """

    graphs: Sequence[torch.cuda.CUDAGraph]
    given: Tensor
    out: Tensor


class _Cuts:
    """Replaces one graph in `torch.cuda.graph` by several: a cut ends one and begins the next."""

    def __init__(self) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self._begun: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

    def capture_begin(self, *args: Any, **options: Any) -> None:
        self._begun = args, options
        self.graphs.append(torch.cuda.CUDAGraph())
        self.graphs[-1].capture_begin(*args, **options)

    def capture_end(self) -> None:
        self.graphs[-1].capture_end()

    def cut(self) -> None:
        self.capture_end()
        args, options = self._begun
        self.capture_begin(*args, **options)


def capture_in_chunks(
    given: Tensor,
    run: Callable[[Tensor], Tensor],
    places: Sequence[nn.Module],
    n_pieces: int,
    pool: Any,
    on: torch.cuda.Stream | None,
) -> ChunkedGraph:
    """Capture `run` on a copy of its input as at most `n_pieces` graphs, cut at calls of `places`.

    Each graph has about as many of these calls. They share `pool` and are captured on the stream `on`, as in
    `capture_graph`.

    Raises:
        RuntimeError: the device's, in a capture.
    """
    fixed, n_calls, cuts = given.clone(), 0, _Cuts()

    def count() -> None:
        nonlocal n_calls
        n_calls += 1

    with before_each(places, count):
        warm_up(run, fixed)
    n_calls, at = 0, cut_calls(n_calls // WARM_UPS, n_pieces)

    def cut() -> None:
        if n_calls in at:
            cuts.cut()
        count()

    # A capture that fails may leave its own stream the current one.
    stream = torch.cuda.stream(torch.cuda.current_stream(given.device))
    whole = torch.cuda.graph(cast(torch.cuda.CUDAGraph, cuts), pool=pool, stream=on)
    with CAPTURING, torch.cuda.device_of(given), stream, before_each(places, cut), whole:
        out = run(fixed)
    return ChunkedGraph(tuple(cuts.graphs), fixed, out)


def cut_calls(n_calls: int, n_pieces: int) -> set[int]:
    """Return before which of so many calls a piece begins, the first piece not counted."""
    return {round(n_calls * piece / n_pieces) for piece in range(1, n_pieces)} - {0, n_calls}


@contextmanager
def before_each(places: Sequence[nn.Module], callback: Callable[[], None]) -> Iterator[None]:
    """Call `callback` before each forward of these modules in the block, of this thread's."""
    own = threading.get_ident()

    def hook(*_: object) -> None:
        if threading.get_ident() == own:
            callback()

    # By the class: these places are counted where a lowered model runs its own forward, so that hooks are called.
    handles = [nn.Module.register_forward_pre_hook(place, hook) for place in places]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


GRAIN = 64
"""Sizes up to `WHOLE` are multiples of this, as tiles of products are."""
WHOLE = 512
"""Tokens up to which a prompt runs whole, whatever the chunk: launching a part of it takes longer than running all."""
MOST = 2048
"""Tokens of the largest forward: with more, the device works longer on its kernels than the host launches them."""
PIECE = 128
"""Tokens of a forward of one piece. With 64 slots of a 1B model on an H200 99 of 100 tokens came within 3.1 ms of the
last where whole forwards overlapped steps, with chunks of 256, 192 and 128 tokens within 2.6, 2.4 and 2.2."""
SHORTEST = 16
"""Tokens of a prompt, on average, of which a forward takes as many as it has room for."""
USUAL = 96
"""Tokens of a prompt, on average, of which a second form takes as many: attention is launched for as many prompts of
the whole size as a forward may hold, so that those that are not there cost launches too."""


def sizes_of(chunk: int, max_len: int, limit: int | None = None) -> list[int]:
    """Return the tokens of forwards of up to `chunk`, and beyond it of up to `WHOLE`, for one prompt.

    They are multiples of `GRAIN` up to `WHOLE`, and then 5, 6, 7 and 8 quarters of a power of two: padding adds at most
    a quarter. None is above `MOST`, or the `limit` of a row.
    """
    most = min(max(chunk, min(WHOLE, max_len)), MOST, MOST if limit is None else limit)
    sizes = set(range(GRAIN, min(WHOLE, most) + 1, GRAIN)) | {most, *([chunk] if chunk < most else [])}
    size = WHOLE
    while size < most:
        sizes |= {part * size // 4 for part in (5, 6, 7, 8) if part * size // 4 < most}
        size *= 2
    return sorted(sizes)


class PromptForwards:
    """Prefill forwards over packed prompts of empty slots; each prompt attends to itself alone.
    The last one is padded on the right, where nothing attends to it.

    With `is_captured` every size is a CUDA graph or, by how many prompts it takes, two. The first prompt makes them
    all, so no later one waits for it, and they share their memory. Prompts of any lengths then cost a copy and a
    replay, on a stream of their own: they overlap what comes next on the caller's, which may touch neither their
    slots nor their logits before `wait`. Larger ones are in pieces of some layers each: `run` launches the first, each
    `launch_next` another, so that those who decode meanwhile get their tokens after steps of like length.

    Attributes:
        sizes: tokens of a forward, the fewest first.
        captures: forwards that have been captured.
    """

    def __init__(self, model: Model, ctx: Context, sizes: Sequence[int], *, is_captured: bool) -> None:
        self.model, self.ctx = model, ctx
        self.sizes, self.is_captured = tuple(sizes), is_captured
        self.captures = 0
        self._n_slots = batch_size_of(ctx)
        self._device = model.embedder.token.weight.device
        self._graphs: dict[tuple[int, int], ChunkedGraph] = {}
        # Pieces of what runs that have not been launched, the next one last.
        self._rest: list[torch.cuda.CUDAGraph] = []
        self._running: tuple[int, ChunkedGraph] | None = None  # what they are of, and how many prompts it takes
        is_cuda = is_captured and self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if is_cuda else None
        self._ran = torch.cuda.Event() if is_cuda else None

    @property
    def widest(self) -> int:
        """Tokens of the longest prompt that a forward takes."""
        return self.sizes[-1]

    def counts(self, size: int) -> list[int]:
        """Return how many prompts the forwards of a size take, the fewest first."""
        return sorted({min(self._n_slots, max(1, size // each)) for each in (SHORTEST, USUAL)})

    def size_for(self, n_prompts: int, n_tokens: int, most: int) -> int | None:
        """Return the size of fewest tokens, at most `most` of them, that prompts of so many in all fit."""
        for size in self.sizes:
            if n_tokens <= size <= most and n_prompts <= self.counts(size)[-1]:
                return size
        return None

    def run(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """Fill slots with prompts, which a size takes, and return the logits after each, [n, V], for after `wait`.

        The next call, which comes after `wait`, overwrites them.
        """
        size = self.size_for(len(prompts), sum(map(len, prompts)), MOST)
        assert size is not None
        n_prompts = next(n for n in self.counts(size) if n >= len(prompts))
        self.capture(slots[0])
        given = stage(pack_prompts(slots, prompts, size, n_prompts), self._device)
        if not self.is_captured:
            return self._forward(n_prompts, given.to(self._device, non_blocking=True))[: len(slots)]
        pieces = self._graphs[size, n_prompts]
        with self._on_side_stream():
            pieces.given.copy_(given, non_blocking=True)
        self._rest, self._running = list(reversed(pieces.graphs)), (n_prompts, pieces)
        self.launch_next()
        return pieces.out[: len(slots)]

    def launch_next(self) -> bool:
        """Launch the next piece of the prompts that run, after what the current stream does now; whether there was
        one."""
        if not self._rest:
            return False
        with self._on_side_stream():
            self._rest.pop().replay()
            if not self._rest and self._ran is not None:
                self._ran.record(self._stream)
        return True

    @contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        """Launch on the prompts' own stream, after what the current one does now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    @property
    def is_done(self) -> bool:
        """Whether the prompts that ran last have, so that nobody waits in `wait`."""
        return not self._rest and (self._ran is None or self._ran.query())

    def wait(self) -> None:
        """Let what comes next on the current stream run after the prompts, all of whose pieces are launched."""
        while self.launch_next():
            pass
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def forget(self) -> None:
        """Drop the graphs: the weights that they read have moved. Prompts of which pieces are left run again, whole."""
        if self._stream is not None:
            self._stream.synchronize()
        if self._rest and self._running is not None:
            self._rest.clear()
            n_prompts, pieces = self._running
            pieces.out.copy_(self._forward(n_prompts, pieces.given))
        self._running = None
        self._graphs.clear()

    def capture(self, slot: int) -> None:
        """Make the graphs of all sizes where there are none, filling a slot with nothing of worth.

        Raises:
            RuntimeError: the device's, for want of memory or of anything else; there are then no graphs.
        """
        if self._graphs or not self.is_captured:
            return
        graphs: dict[tuple[int, int], ChunkedGraph] = {}
        pool, places = torch.cuda.graph_pool_handle(), [layer for _, layer in self.model.attention_layers()]
        for size in reversed(self.sizes):  # the smaller ones find room in the memory of the largest
            for n_prompts in reversed(self.counts(size)):
                given = torch.tensor(pack_prompts([slot], [[0] * size], size, n_prompts))
                run = functools.partial(self._forward, n_prompts)
                made = capture_in_chunks(given.to(self._device), run, places, -(-size // PIECE), pool, self._stream)
                graphs[size, n_prompts] = made
                self.captures += 1
        self._graphs = graphs

    def _forward(self, n_prompts: int, given: Tensor) -> Tensor:
        return fill_slots(self.model, self.ctx, given, n_prompts)


def pack_prompts(slots: Sequence[int], prompts: Sequence[Sequence[int]], size: int, n_prompts: int) -> list[int]:
    """Return what `fill_slots` reads of prompts in a row of `size` tokens: slots and the places of last tokens, N each,
    where prompts begin, N + 1, and the tokens. Those of the N that are not there have no tokens."""
    starts, tokens = [0], list[int]()
    for prompt in prompts:
        tokens += prompt
        starts.append(len(tokens))
    last = [end - 1 for end in starts[1:]]
    n_more = n_prompts - len(prompts)
    starts[-1] = size  # padding goes behind the last prompt, where that one's next tokens overwrite it unread
    return [
        *slots,
        *[slots[-1]] * n_more,
        *last,
        *[last[-1]] * n_more,
        *starts,
        *[size] * n_more,
        *tokens,
        *[0] * (size - len(tokens)),
    ]


def fill_slots(model: Model, ctx: Context, given: Tensor, n_prompts: int) -> Tensor:
    """Run prompts into slots of `ctx` and return the logits after each.

    Shape: what `pack_prompts` gives, int64, to [N, V].
    """
    n_tokens = len(given) - 3 * n_prompts - 1
    slots, last, starts, tokens = given.split_with_sizes([n_prompts, n_prompts, n_prompts + 1, n_tokens])
    most = ctx.caches[0].allocations[0].shape[2]
    prompts = StoredDocuments.packed(starts, slots, n_tokens, most, ctx.caches)
    with packed_attention(given.device, n_tokens), shared_angles():
        hidden = model.hidden(tokens[None], prompts)
    return model.logits(hidden[0, last])


def batch_size_of(ctx: Context) -> int:
    """Return the rows of a context."""
    return ctx.caches[0].allocations[0].shape[0]
