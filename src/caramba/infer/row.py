"""One row of a generation: its sampled tokens, its text, and its finish reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from caramba.config.generate import GenerateConfig
from caramba.data import Tokenizer
from caramba.errors import CheckpointError, ConfigError
from caramba.infer.stream import TextStream

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
    ) -> list[GenerationRow]:
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
