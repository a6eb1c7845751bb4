"""A forward captured as several CUDA graphs, which a device runs one after the other, each when it is launched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from caramba.infer.device_steps import CAPTURING, WARM_UPS, warm_up


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
