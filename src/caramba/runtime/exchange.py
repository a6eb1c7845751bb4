"""In-place all-reduce (mean) of tensors over all ranks, overlapped with computation."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager  # pyright: ignore[reportPrivateUsage]

AHEAD = 2
"""Maximum groups in flight on a CPU: each may hold a narrow copy."""


class BucketAllReduce:
    """Replaces groups of tensors by their means over all ranks, one all-reduce a group, while other work runs.

    Every rank begins the same groups in the same order. The tensors of a group are of one dtype, contiguous, on this
    rank's device, and neither read nor written nor freed between `begin` and `wait`. On a GPU both calls return at
    once: exchanges run in a stream of their own, and work queued after `wait` reads the means.

    Args:
        narrow: what sums are made in, a dtype of fewer bytes than the tensors'; None leaves theirs.
    """

    def __init__(self, device: torch.device, narrow: torch.dtype | None = None) -> None:
        self.device, self.narrow = device, narrow
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pending: deque[tuple[Any, Tensor | None, list[Tensor]]] = deque()

    @torch.no_grad()
    def begin(self, tensors: Sequence[Tensor]) -> None:
        """Begin the exchange of a group."""
        if self.stream is None:
            while len(self._pending) >= AHEAD:
                self._end_first()
            self._send(list(tensors))
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):  # which waits in place of the host, and owns narrow copies
            self._send(list(tensors))
            self._end_first()

    @torch.no_grad()
    def wait(self) -> None:
        """Have the means of all groups that were begun."""
        while self._pending:
            self._end_first()
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def forget(self) -> None:
        """Let go of groups that were begun, in a step that failed: their ranks may never answer."""
        self._pending.clear()

    def _send(self, tensors: list[Tensor]) -> None:
        flat = None
        sent = tensors
        if self.narrow is not None:
            flat = torch.empty(sum(map(torch.numel, tensors)), dtype=self.narrow, device=self.device)
            torch._foreach_copy_(_parts(flat, tensors), tensors)  # pyright: ignore[reportPrivateImportUsage]
            sent = [flat]
        if self.stream is None:  # gloo has sums alone; divided first, none of them is larger than its terms
            torch._foreach_div_(sent, float(dist.get_world_size()))  # pyright: ignore[reportPrivateImportUsage]
        op = dist.ReduceOp.SUM if self.stream is None else dist.ReduceOp.AVG
        with _coalescing_manager(async_ops=True) as work:
            for tensor in sent:
                dist.all_reduce(tensor, op=op)
        self._pending.append((work, flat, tensors))

    def _end_first(self) -> None:
        work, flat, tensors = self._pending.popleft()
        work.wait()
        if flat is not None:
            torch._foreach_copy_(tensors, _parts(flat, tensors))  # pyright: ignore[reportPrivateImportUsage]


def _parts(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Return views of a flat tensor, one for each tensor and of its shape."""
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)]
