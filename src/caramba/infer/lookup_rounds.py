"""Rounds of prompt lookup on the device: forward, draw, what is kept, and the next drafts, all of it one CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from caramba.config.generate import GenerateConfig, SpeculativeConfig
from caramba.infer.device_steps import Captured, capture_graph
from caramba.infer.row import GenerationRow
from caramba.infer.sampling import chosen_tokens, uniforms
from caramba.infer.verification import seen_along
from caramba.infer.verify_forwards import WIDTHS, VerifyForwards
from caramba.ops.dba_decode import MAX_QUERIES
from caramba.ops.prompt_lookup_step import prompt_lookup_step
from caramba.runtime.device import wide_dtype

N_DRAFTS = MAX_QUERIES - 1
"""Drafts that one forward verifies at most, in addition to the token before them."""


@dataclass
class Round:
    """What came of a round, by row.

    Attributes:
        kept: how many of `tokens` became text; those behind them are nothing.
        bits: see `logprobs`.
        sizes: length of the run that the next drafts stood behind, 0 where there are none.
        drafts: the next drafts, `N_DRAFTS` a row.
    """

    kept: list[int]
    tokens: list[list[int]]
    bits: Tensor
    sizes: list[int]
    drafts: list[list[int]]

    def logprobs(self) -> list[list[float]]:
        """Return log softmax(logits) in nats of each token; to be asked for before the next `read`."""
        return self.bits.to(torch.int32).view(torch.float32).tolist()


class LookupRounds:
    """Rounds over rows that `steps` runs forwards of. The texts are on the device, and `first` and `launch` only queue
    work there: the host waits in `read`, for a few numbers a row, and chooses how many tokens the next round takes.

    Between `launch` and its `read` the host is free. Graphs, one a width, hold the sampling of `config` as constants.
    `captures` counts them.
    """

    def __init__(self, steps: VerifyForwards, config: GenerateConfig, speculation: SpeculativeConfig) -> None:
        self.steps, self.ctx, self.config, self.speculation = steps, steps.ctx, config, speculation
        self.most = min(speculation.spec_k, N_DRAFTS)
        self.captures = 0
        held = self.ctx.device_lengths
        n_rows, device = held.shape[0], held.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.ids = zeros(n_rows, self.ctx.limit + MAX_QUERIES)
        self.state = zeros(n_rows, 2 + N_DRAFTS)
        self.live = zeros(n_rows, dtype=torch.bool)
        self.n_prompt = zeros(n_rows)
        self.uniform = zeros(n_rows, config.max_new_tokens, dtype=wide_dtype(device))
        vocab_size = steps.model.spec.embedder.vocab_size
        has_penalty = config.repetition_penalty != 1.0
        self.seen = zeros(n_rows, vocab_size, dtype=torch.bool) if has_penalty else None
        self._graphs: dict[int, Captured] = {}
        is_cuda = device.type == "cuda"
        # Two, as one is still read from when the next round is queued.
        shape = (2, n_rows * (3 + N_DRAFTS + 2 * MAX_QUERIES))
        self._host = torch.zeros(shape, dtype=torch.int64, pin_memory=is_cuda)
        self._read = torch.cuda.Event() if is_cuda else None
        self._turn, self._width = 0, 1
        self._before: list[int] = []  # tokens of each row before the round that was queued last

    def refill(self, rows: Sequence[GenerationRow]) -> None:
        """Begin with rows whose prompts the context has just seen, in the memory of those before."""
        prompts = torch.zeros(len(rows), max(len(row.prompt) for row in rows), dtype=torch.int64)
        for index, row in enumerate(rows):
            prompts[index, : len(row.prompt)] = torch.tensor(row.prompt)
        self.ids[:, : prompts.shape[1]].copy_(prompts)
        lengths = torch.tensor([len(row.prompt) for row in rows])
        self.n_prompt.copy_(lengths)
        self.state.zero_()
        self.state[:, 1].copy_(prompts.gather(1, lengths[:, None] - 1)[:, 0])
        self.live.fill_(True)
        self.uniform.copy_(torch.stack([uniforms(row.seed, self.uniform.shape[1]) for row in rows]))
        if self.seen is not None:
            seen = torch.zeros(self.seen.shape, dtype=torch.bool)
            for index, row in enumerate(rows):
                seen[index, row.prompt] = True
            self.seen.copy_(seen)

    def first(self, logits: Tensor) -> None:
        """Queue the draw behind each prompt. Shape: [B, V]."""
        self._before = [n - 1 for n in self.ctx.lengths]  # as if the last of each prompt had been a round
        uniform = self.uniform[:, :1]
        self._send(self._keep(logits[:, None], self.state[:, 1:2].clone(), uniform), 1)

    def launch(self, n_drafts: int) -> None:
        """Queue a round that verifies up to `n_drafts` of each row's drafts, 0 to `N_DRAFTS`.

        Raises:
            CacheFull: a row has no place for them.
        """
        width = next(width for width in WIDTHS if width > n_drafts)
        self.ctx.width = width
        self._before = list(self.ctx.lengths)
        with self.ctx.host_counted_forward():
            if not self.steps.is_captured:
                found = self._round()
            else:
                if width not in self._graphs:
                    self._graphs[width] = self._capture()
                graph, _, found = self._graphs[width]
                graph.replay()
        self._send(found, width)

    def read(self) -> Round:
        """Wait for the round that was queued last, and return what came of it."""
        if self._read is not None:
            self._read.synchronize()
        n_rows, width = self.state.shape[0], self._width
        n_columns = 3 + N_DRAFTS + 2 * width
        found = self._host[self._turn][: n_rows * n_columns].view(n_rows, n_columns)
        words = found.tolist()
        ends = (3 + N_DRAFTS, 3 + N_DRAFTS + width)
        kept = [row[0] for row in words]
        self.ctx.lengths = [n + own for n, own in zip(self._before, kept, strict=True)]
        return Round(
            kept,
            [row[ends[0] : ends[1]] for row in words],
            found[:, ends[1] :],
            [row[1] for row in words],
            [row[3 : ends[0]] for row in words],
        )

    def retire(self, index: int) -> None:
        """Leave out of the rounds to come what a row would keep."""
        self.live[index].fill_(False)

    def _round(self) -> Tensor:
        width = self.ctx.width
        fed = self.state[:, 1 : 1 + width].clone()
        uniform = self.uniform[:, :1].expand(-1, width)
        if self.config.temperature > 0:  # by how many new tokens each row has; else no number counts
            made = (self.ctx.device_lengths + 1 - self.n_prompt)[:, None] + torch.arange(
                width, device=fed.device
            )
            uniform = self.uniform.gather(1, made.clamp(max=self.uniform.shape[1] - 1))
        return self._keep(self.steps.logits(fed), fed, uniform)

    def _keep(self, logits: Tensor, fed: Tensor, uniform: Tensor) -> Tensor:
        """Draw behind every token that was fed, by a number each, and keep what agrees with the drafts.

        Shape: logits [B, T, V], fed and uniform [B, T], to what the host reads, int64 [B, 3 + N_DRAFTS + 2 T].
        """
        seen = None if self.seen is None else seen_along(self.seen, fed).flatten(0, 1)
        token, logprob = chosen_tokens(logits.flatten(0, 1), self.config, seen, uniform.flatten())
        drawn = token.view(fed.shape)
        speculation = self.speculation
        kept = prompt_lookup_step(
            *(self.ids, self.ctx.device_lengths, self.state, drawn, self.live),
            *(self.most, speculation.max_ngram, speculation.spec_extra_token),
        )
        if self.seen is not None:  # in the place of what is not kept, a token that was seen
            is_kept = torch.arange(fed.shape[1], device=fed.device) < kept[:, None]
            self.seen.scatter_(1, torch.where(is_kept, drawn, fed[:, :1]), True)
        bits = logprob.float().view(fed.shape).view(torch.int32).long()
        return torch.cat((kept[:, None], self.state, drawn, bits), dim=1)

    def _send(self, found: Tensor, width: int) -> None:
        """Queue the copy of a round's numbers to the host."""
        self._turn, self._width = 1 - self._turn, width
        host = self._host[self._turn][: found.numel()].view(found.shape)
        # Only where an event is waited for: elsewhere `read` would not see the end of such a copy.
        host.copy_(found, non_blocking=self._read is not None)
        if self._read is not None:  # of the rows' own device, which need not be the current one
            self._read.record(torch.cuda.current_stream(found.device))

    def _capture(self) -> Captured:
        changed = [self.ids, self.ctx.device_lengths, self.state, *([] if self.seen is None else [self.seen])]
        before = [x.clone() for x in changed]

        def restore() -> None:
            for x, old in zip(changed, before, strict=True):
                x.copy_(old)

        def trial(_: Tensor) -> Tensor:
            restore()  # the same round each time
            return self._round()

        self.captures += 1
        made = capture_graph(self.live, lambda _: self._round(), trial)
        restore()
        return made
