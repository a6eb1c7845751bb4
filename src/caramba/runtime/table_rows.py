"""The gradient of an embedding as the rows that a batch has read, which ranks gather in place of whole tables.

A table takes its gradient at the very end of backward, when no work is left to hide an exchange under. Its rows are as
many as tokens. What a tied head adds to the gradient is there when backward begins, and goes with the others.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from caramba.errors import CarambaError

# By its name since torch 2.13; the older one warns there, and is all there is before.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class EmbeddingGradRows:
    """Keeps, while `is_kept`, the gradients of what a table gave, which its weight then gets no gradient for.

    Replaces the table's forward until `remove`. Every rank reads equally many tokens.

    Args:
        table: without options of its own (`takes_rows`).
        is_tied: whether the weight takes gradients elsewhere besides.
    """

    def __init__(self, table: nn.Embedding, *, is_tied: bool) -> None:
        self.table, self.is_tied, self.is_kept = table, is_tied, False
        self.kept: list[tuple[Tensor, Tensor]] = []
        # Through the weight itself backward would wait for the table with what a head has for it.
        self._anchor = torch.zeros((), device=table.weight.device, requires_grad=True)
        self._before = table.__dict__.get("forward")
        table.forward = self._look_up

    def expect(self, tokens: int) -> bool:
        """Decide whether rows are kept of a step whose last micro-batch has so many tokens on every rank.

        They are where gathering them moves at most two thirds of what a sum of tables does, and where nothing but a
        head's part would be left in the weight's own gradient.
        """
        self.kept.clear()
        is_alone = self.is_tied or self.table.weight.grad is None
        self.is_kept = is_alone and 3 * tokens * dist.get_world_size() <= 4 * self.table.num_embeddings
        return self.is_kept

    @torch.no_grad()
    def add_mean(self, narrow: torch.dtype | None = None) -> None:
        """Add the mean of the kept rows over all ranks to the weight's gradient, bit-equal on all ranks.

        Args:
            narrow: dtype that rows are sent in; None leaves theirs.

        Raises:
            CarambaError: backward has not reached the table.
        """
        if not self.is_kept:
            return
        if not self.kept:
            raise CarambaError(
                "an embedding had no gradient in a step, and its mean cannot be taken: freeze it"
            )
        weight = self.table.weight
        ids = torch.cat([ids for ids, _ in self.kept])
        rows = torch.cat([rows for _, rows in self.kept]).to(narrow or weight.dtype)
        self.kept.clear()
        self.is_kept = False
        rows /= dist.get_world_size()
        every = _gathered(rows).to(weight.dtype)
        # It sorts by row and sums in that order: sums of ranks that differ would part their weights.
        whole = torch.ops.aten.embedding_dense_backward(every, _gathered(ids), len(weight), -1, False)
        weight.grad = whole if weight.grad is None else weight.grad.add_(whole)

    def remove(self) -> None:
        """Leave the table as it was."""
        self.kept.clear()
        if self._before is None:
            self.table.__dict__.pop("forward", None)
        else:
            self.table.forward = self._before

    def _look_up(self, input: Tensor) -> Tensor:
        if not (self.is_kept and torch.is_grad_enabled()):
            return nn.functional.embedding(input, self.table.weight)
        return _KeptRows.apply(self._anchor, input, self.table.weight.detach(), self.kept)


def takes_rows(table: nn.Module) -> bool:
    """Whether a module is an embedding whose gradient is the sum of its rows' and nothing else."""
    return (
        type(table) is nn.Embedding
        and table.weight.requires_grad
        and table.padding_idx is None
        and table.max_norm is None
        and not table.scale_grad_by_freq
        and not table.sparse
    )


class _KeptRows(torch.autograd.Function):
    """Looks rows up; backward keeps (ids [N], gradients [N, M]) in a list."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, ids: Tensor, weight: Tensor, kept: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        ctx.ids, ctx.kept = ids, kept
        return nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None, None]:
        ctx.kept.append((ctx.ids.flatten(), gradients[0].flatten(0, -2)))
        return None, None, None, None


def _gathered(tensor: Tensor) -> Tensor:
    """Return the rows of all ranks [W N, ...], in their order."""
    whole = tensor.new_empty(dist.get_world_size() * len(tensor), *tensor.shape[1:])
    _all_gather(whole, tensor.contiguous())
    return whole
