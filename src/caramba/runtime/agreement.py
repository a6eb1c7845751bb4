"""Agreement of all ranks on a signal at the same step, without a wait."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from caramba.runtime.distributed import is_distributed


class Agreement:
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
