"""Generation by rounds of prompt lookup that run on the device: the host chooses their widths and takes the text."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from caramba.config.generate import SpeculativeConfig
from caramba.infer.draft_controller import PRICE_ALONE, PRICE_TOGETHER, DraftController
from caramba.infer.lookup_rounds import N_DRAFTS, LookupRounds, Round
from caramba.infer.row import GenerationRow, OnText
from caramba.infer.verification import SpeculativeStats


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
