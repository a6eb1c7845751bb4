"""New tokens as text while they come: whole characters only, and cut exactly where a stop text begins."""

from __future__ import annotations

from collections.abc import Sequence

from caramba.data import Tokenizer

BROKEN = "\ufffd"
CONTEXT_TOKENS = 8  # of the prompt: some tokenizers strip a space from the first token that they decode


class TextStream:
    """The text of one row. FusedLinear, what `push` and `close` return is the decoded text, up to the stop text if any.

    A character whose bytes are not all there yet, and text that may still become a stop text, are buffered. Of
    several stop texts that which ends first counts, of those the longest, so it does not matter where tokens end.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stop: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self._matchers = [StopMatcher(text) for text in stop]
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
        """Return what was kept back: no more tokens come."""
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
        """Add text and return what no stop text can begin in."""
        for offset, character in enumerate(text if self._matchers else ""):
            ended = [len(matcher.stop) for matcher in self._matchers if matcher.push(character)]
            if ended:  # a match never begins before the text that was kept back
                start = len(self._held) + offset + 1 - max(ended)
                self.is_stopped, text, self._held = True, self._held + text, ""
                return text[:start]
        text = self._held + text
        end = len(text) - max((matcher.n_matched for matcher in self._matchers), default=0)
        self._held = text[end:]
        return text[:end]


class StopMatcher:
    """Finds one stop text in characters that come one at a time, by the algorithm of Knuth, Morris and Pratt.

    All calls together take time linear in the characters pushed, however long the stop text is: the table of borders
    grows only as far as the text has matched.

    Attributes:
        n_matched: length of the longest end of the text so far that begins the stop text.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.n_matched = 0
        self._borders = [0]  # of each prefix, the length of the longest proper prefix that also ends it

    def push(self, character: str) -> bool:
        """Add a character; return True if it completes the stop text, after which no more may come."""
        self.n_matched = self._extend(self.n_matched, character)
        if self.n_matched == len(self.stop):
            return True
        if self.n_matched > len(self._borders):
            self._borders.append(self._extend(self._borders[-1], character))
        return False

    def _extend(self, n_matched: int, character: str) -> int:
        while n_matched and self.stop[n_matched] != character:
            n_matched = self._borders[n_matched - 1]
        return n_matched + (self.stop[n_matched] == character)
