"""Verifying forwards that run by themselves on the device: a few tokens of every row, compiled or captured by width."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.cache import DeviceContext
from caramba.infer.device_steps import Captured, capture_graph, compile_logits, form_of, replay_graph
from caramba.model import Model
from caramba.ops.dba_decode import MAX_QUERIES

WIDTHS = (1, 2, 4, MAX_QUERIES)
"""Tokens per row that a forward takes: fewer are filled up, so that a few graphs serve every number of drafts."""


class VerifyForwards:
    """Forwards over rows of a model at positions of their own, with the logits after every token.

    Host and device both count the rows' lengths; each width's forward is one graph on the device. Padding tokens follow
    a row's own: nothing attends to them, and `rewind`, which must follow every call, discards them. `captures` counts
    graphs.
    """

    def __init__(self, model: Model, ctx: DeviceContext, *, is_compiled: bool, is_captured: bool) -> None:
        self.model, self.ctx = model, ctx
        self.is_compiled, self.is_captured = is_compiled, is_captured
        self.captures = 0
        self._graphs: dict[int, Captured] = {}
        if is_compiled:
            for buffer in (one for cache in ctx.ctx.caches for one in cache.memory):
                torch._dynamo.maybe_mark_dynamic(buffer, 2)  # one graph serves every length bucket

    def __call__(self, tokens: Tensor) -> Tensor:
        """Run the next tokens of every row behind its own. Shape: [B, T] int64 to [B, T, V].

        Raises:
            CacheFull: a row has no place for them.
        """
        parts = [self._part(part) for part in tokens.split(MAX_QUERIES, dim=1)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _part(self, tokens: Tensor) -> Tensor:
        n_tokens = tokens.shape[1]
        width = next(width for width in WIDTHS if width >= n_tokens)
        filled = tokens[:, -1:].expand(-1, width - n_tokens)
        logits = self._forward(torch.cat((tokens, filled), dim=1), width)[:, :n_tokens]
        # A replay of the next part overwrites what this one left.
        return logits.clone() if self.is_captured else logits

    def _forward(self, tokens: Tensor, width: int) -> Tensor:
        ctx = self.ctx
        ctx.width = width
        with ctx.host_counted_forward():
            if self.is_captured and width not in self._graphs:
                start = ctx.device_lengths.clone()

                def trial(given: Tensor) -> Tensor:
                    ctx.device_lengths.copy_(start)  # at the same places each time
                    return self.logits(given)

                self.captures += 1
                self._graphs[width] = capture_graph(tokens, self.logits, trial)
                ctx.device_lengths.copy_(start)
            if self.is_captured:
                return replay_graph(self._graphs[width], tokens)
            return self.logits(tokens)

    def logits(self, tokens: Tensor) -> Tensor:
        """Run one forward as a function of tensors alone, at the context's width. Shape: [B, T] to [B, T, V]."""
        if not self.is_compiled:
            return row_logits(self.model, tokens, self.ctx)
        form = form_of(self.model, self.ctx.ctx)
        return compile_logits(self.model, tokens.shape[0], *form, tokens.shape[1], run=row_logits)(
            self.model, tokens, self.ctx
        )


def row_logits(model: Model, tokens: Tensor, ctx: DeviceContext) -> Tensor:
    """Return the logits after every token. Shape: [B, T] int64 to [B, T, V]."""
    return model.logits(model.hidden(tokens, ctx))
