"""New tokens as text while they come: whole characters only, and cut exactly where a stop text begins."""

from __future__ import annotations

from collections.abc import Sequence

from caramba.data import Tokenizer

BROKEN = "\ufffd"
CONTEXT_TOKENS = 8  # of the prompt: some tokenizers strip a space from the first token that they decode


class TextStream:
    """The text of one row. Joined, what `push` and `close` return is the decoded text, up to the stop text if any.

    A character whose bytes are not all there yet, and text that may still become a stop text, are held back. Of
    several stop texts that which ends first counts, of those the longest, so it does not matter where tokens end.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.is_stopped = False
        self._ids = self._known(prompt)[-CONTEXT_TOKENS:]
        if self.tokenizer.decode(self._ids).endswith(BROKEN):
            self._ids = []
        self._read = len(self._ids)  # ids before this one are text already
        self._held = ""

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens and return the text that is now certain."""
        out = ""
        for token in self._known(tokens):
            if self.is_stopped:
                break
            self._ids.append(token)
            out += self._settle(self._new_text(is_last=False))
        return out

    def close(self) -> str:
        """Return what was held back: no more tokens come."""
        if self.is_stopped:
            return ""
        out = self._settle(self._new_text(is_last=True))
        held, self._held = self._held, ""
        return out if self.is_stopped else out + held

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Leave out entries that only the model has: a vocabulary padded to a round size."""
        return [token for token in tokens if token < self.tokenizer.vocab_size]

    def _new_text(self, is_last: bool) -> str:
        before = self.tokenizer.decode(self._ids[: self._read])
        now = self.tokenizer.decode(self._ids)
        if len(now) <= len(before) or (now.endswith(BROKEN) and not is_last):
            return ""
        # What is text now is the context of the next tokens; older ids are no longer needed.
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        return now[len(before) :]

    def _settle(self, text: str) -> str:
        held = self._held + text
        found = [(at + len(stop), at) for stop in self.stop if (at := held.find(stop)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return held[: min(found)[1]]
        keep = max(
            (n for stop in self.stop for n in range(1, len(stop)) if held.endswith(stop[:n])), default=0
        )
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]
