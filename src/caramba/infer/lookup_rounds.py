"""Prompt lookup on the device: rounds in one CUDA graph, and the loop and the controller of the host around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from caramba.config.generate import GenerateConfig, SpeculativeConfig
from caramba.infer.device_steps import Captured, capture_graph
from caramba.infer.drafting import DraftLength
from caramba.infer.row import GenerationRow, OnText
from caramba.infer.step import chosen_tokens, pad_prompts, seen_in, uniforms
from caramba.infer.verification import WIDTHS, SpeculativeStats, VerifyForwards, seen_along
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
        prompts = pad_prompts([row.prompt for row in rows])
        self.ids[:, : prompts.shape[1]].copy_(prompts)
        lengths = torch.tensor([len(row.prompt) for row in rows])
        self.n_prompt.copy_(lengths)
        self.state.zero_()
        self.state[:, 1].copy_(prompts.gather(1, lengths[:, None] - 1)[:, 0])
        self.live.fill_(True)
        self.uniform.copy_(torch.stack([uniforms(row.seed, self.uniform.shape[1]) for row in rows]))
        if self.seen is not None:
            self.seen.copy_(seen_in([row.prompt for row in rows], self.seen.shape[1]))

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
            made = (self.ctx.device_lengths + 1 - self.n_prompt)[:, None] + torch.arange(width, device=fed.device)
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


PRICE_ALONE, PRICE_TOGETHER = 0.4, 0.2
"""What a forward over 2 to 8 tokens of a row takes longer than one over 1, in forwards over 1: of one row, whose
products then go to tensor cores, and of several, whose products are there already.

On an H200 a 1B model verifies 8 tokens in 1.18 ms where a step takes 0.87; how many they are counts for little. The
price is a constant, not timed: which forwards run must not depend on the clock, as their roundings differ.
"""
FIRST_WORTH = (0.4, 0.8, 1.4, 2.0)
"""Accepted drafts behind a run of 1, 2, 3, and more tokens, before a row has shown any."""
RATE = 1 / 12


class DraftController:
    """Learns how many drafts after a match of each length become text, and estimates the gain of drafting next.

    Drafts cost nothing to look up, so those that are not verified are judged as well, by the text that comes.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self.config = config
        # How many are verified together hardly changes what it takes, so their number does not adapt.
        self.length = DraftLength(config.model_copy(update={"spec_k_adaptive": False}))
        self.worth = {size: FIRST_WORTH[min(size, 4) - 1] for size in range(1, config.max_ngram + 1)}
        self._open: list[tuple[int, Sequence[int], int]] = []  # run, drafts, and those that became text so far

    def expected_accepted(self, size: int, left: int) -> float:
        """Return the tokens that drafts behind a run of `size` tokens are expected to add, of at most `left`.

        It is 0 where there are none or drafting has stopped, and `left` where it does not adapt.
        """
        if size == 0 or left < 1 or self.length.next(left) == 0:
            return 0.0
        return min(self.worth[size], left) if self.config.spec_k_adaptive else float(left)

    def learn(self, size: int, drafts: Sequence[int], tokens: Sequence[int], drafted: int) -> int:
        """Update from the tokens after offered drafts, `drafted` of them verified; return the number accepted."""
        accepted = common_prefix_len(drafts[:drafted], tokens)
        self.length.update(drafted, accepted, len(tokens))
        offered = self._open if size == 0 else [*self._open, (size, drafts, 0)]
        self._open = []
        for run, own, n_before in offered:
            n = n_before + common_prefix_len(own[n_before:], tokens)
            if n == n_before + len(tokens) and n < len(own):
                self._open.append((run, own, n))
            else:
                self.worth[run] += RATE * (n - self.worth[run])
        return accepted


def common_prefix_len(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """Return how many tokens two texts begin with in common."""
    for at, (mine, theirs) in enumerate(zip(drafts, tokens, strict=False)):
        if mine != theirs:
            return at
    return min(len(drafts), len(tokens))


class LookupLoop:
    """Rounds of some rows until all have ended. Each draws as the plain Generator does, from the same numbers.

    What the device waits for is as little as can be: of a round the host reads a few numbers, chooses the width of the
    next one, queues it, and takes tokens and text while it runs. A stop text is therefore found when one more round is
    in progress, which then counts for nothing.
    """

    def __init__(
        self,
        rows: Sequence[GenerationRow],
        rounds: LookupRounds,
        speculation: SpeculativeConfig,
        stats: SpeculativeStats,
    ) -> None:
        self.rows, self.rounds, self.stats = rows, rounds, stats
        self.paces = [DraftController(speculation) for _ in rows]
        self.most = min(speculation.spec_k, N_DRAFTS)
        self.price = PRICE_ALONE if len(rows) == 1 else PRICE_TOGETHER
        self._left = [row.max_new_tokens for row in rows]  # tokens to come, 0 for a row that has ended
        self._sizes = [0] * len(rows)
        self._drafts: list[list[int]] = [[] for _ in rows]

    def run(self, logits: Tensor, on_text: OnText | None) -> None:
        """Write the rows' texts. Shape: logits behind the prompts [B, V]."""
        rounds, n_drafts, is_first = self.rounds, 0, True
        rounds.first(logits)
        while True:
            found = rounds.read()
            was_live = [left > 0 for left in self._left]
            for index, is_live in enumerate(was_live):
                if is_live:
                    self._count(index, found.tokens[index][: found.kept[index]])
            verified, n_drafts = n_drafts, self._next(found)
            goes_on = any(self._left)
            if goes_on:
                rounds.launch(n_drafts)
                self.stats.steps += 1
            logprobs = found.logprobs()
            for index, is_live in enumerate(was_live):
                if is_live:
                    self._take(index, found, logprobs[index], on_text)
                    if not is_first:
                        self._learn(index, found, verified)
            self._sizes, self._drafts, is_first = found.sizes, found.drafts, False
            if not any(self._left):
                return

    def _count(self, index: int, tokens: Sequence[int]) -> None:
        """Count new tokens of a row, and see whether they end it: before its text is taken, which takes longer."""
        row = self.rows[index]
        self._left[index] = max(0, self._left[index] - len(tokens))
        if any(token in row.eos_ids for token in tokens):
            self._left[index] = 0
        if not self._left[index]:
            self.rounds.retire(index)

    def _next(self, found: Round) -> int:
        """Return how many drafts to verify next: as many as there may be, or none, which is a plain step."""
        gains = [
            # The verifying forward adds a token itself, so the last one is never drafted.
            pace.expected_accepted(size, min(self.most, left - 1))
            for pace, size, left in zip(self.paces, found.sizes, self._left, strict=True)
        ]
        n_live = sum(left > 0 for left in self._left)
        total = sum(gains)
        return self.most if total > 0 and total >= self.price * n_live else 0

    def _take(self, index: int, found: Round, logprobs: Sequence[float], on_text: OnText | None) -> None:
        row, n = self.rows[index], found.kept[index]
        row.take(found.tokens[index][:n], logprobs[:n], on_text)
        if row.finish is not None and self._left[index]:
            self._left[index] = 0
            self.rounds.retire(index)

    def _learn(self, index: int, found: Round, verified: int) -> None:
        """Count how a round went that verified up to so many drafts."""
        pace, stats, size = self.paces[index], self.stats, self._sizes[index]
        before, drafted = pace.length.fallbacks, verified if size else 0
        tokens = found.tokens[index][: found.kept[index]]
        accepted = pace.learn(size, self._drafts[index][: self.most], tokens, drafted)
        stats.row_steps += 1
        stats.drafted += drafted
        stats.accepted += accepted
        stats.judged += min(accepted + 1, drafted)
        stats.fallbacks += pace.length.fallbacks - before
