"""One row of a generation: its sampled tokens, its text while it comes, and its finish reason."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from caramba.config.generate import GenerateConfig
from caramba.data import Tokenizer
from caramba.errors import CheckpointError, ConfigError

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


OnText = Callable[[int, str], None]


@dataclass
class GenerationRow:
    """A prompt and what has followed it so far."""

    index: int
    prompt: list[int]
    seed: int
    eos_ids: tuple[int, ...]
    max_new_tokens: int
    stream: TextStream | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish: Literal["eos", "stop", "length"] | None = None

    @classmethod
    def of(
        cls,
        prompts: Sequence[list[int]],
        config: GenerateConfig,
        eos_ids: tuple[int, ...],
        tokenizer: Tokenizer | None,
        seeds: Sequence[int] | None,
    ) -> "list[GenerationRow]":
        """Return a row per prompt.

        Raises:
            ConfigError: another number of seeds than rows, a seed out of range, or stop texts without a tokenizer.
        """
        if config.stop and tokenizer is None:
            raise ConfigError("generate: stop texts need a tokenizer; give one, or end at eos_token_id")
        given = range(config.first_seed, config.first_seed + len(prompts)) if seeds is None else seeds
        if len(given) != len(prompts) or any(not 0 <= seed < 2**63 for seed in given):
            raise ConfigError(
                f"generate: got seeds {list(given)[:8]} for {len(prompts)} prompts; expected one per prompt, "
                "from 0 to below 2**63"
            )
        return [
            cls(
                index,
                prompt,
                seed,
                eos_ids,
                config.max_new_tokens,
                None if tokenizer is None else TextStream(tokenizer, prompt, config.stop),
            )
            for index, (prompt, seed) in enumerate(zip(prompts, given, strict=True))
        ]

    def take(self, tokens: Sequence[int], logprobs: Sequence[float], on_text: OnText | None) -> None:
        """Take sampled tokens in order until the row ends; those after its end do not count.

        Raises:
            CheckpointError: a log-probability that is not a number.
        """
        if self.stream is None and self.finish is None:
            # As a rule none of them ends the row: many rows would otherwise wait for a loop over all tokens.
            room = self.max_new_tokens - len(self.tokens)
            new, sure = tokens[:room], logprobs[:room]
            if all(map(math.isfinite, sure)) and not any(eos in new for eos in self.eos_ids):
                self.tokens += new
                self.logprobs += sure
                self.finish = "length" if len(self.tokens) == self.max_new_tokens else None
                return
        for token, logprob in zip(tokens, logprobs, strict=True):
            if self.finish is not None:
                return
            if not math.isfinite(logprob):
                raise CheckpointError(
                    f"generate: the model's logits of new token {len(self.tokens)} of row {self.index} are not "
                    f"numbers (log-probability {logprob}); the model diverged or overflows its dtype, use float32"
                )
            if token in self.eos_ids:
                self.finish = "eos"
                return
            self.tokens.append(token)
            self.logprobs.append(logprob)
            if self.stream is not None:
                self._emit(self.stream.push([token]), on_text)
                if self.stream.is_stopped:
                    self.finish = "stop"
                    return
            if len(self.tokens) == self.max_new_tokens:
                self.finish = "length"

    def close(self, on_text: OnText | None) -> None:
        """Take the buffered text; it too may complete a stop text."""
        if self.stream is not None and self.finish != "stop":
            self._emit(self.stream.close(), on_text)
            if self.stream.is_stopped:
                self.finish = "stop"

    def _emit(self, text: str, on_text: OnText | None) -> None:
        self.text += text
        if text and on_text is not None:
            on_text(self.index, text)
