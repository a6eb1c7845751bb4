"""Answers in the two forms of the interface: text completions and chat completions."""

import secrets
import time
from collections.abc import Sequence

from pydantic import BaseModel

from caramba.serve import schema
from caramba.serve.running import Piece, SampledToken
from caramba.serve.schema import Finish, Usage


class TextShape:
    """The form of /v1/completions.

    `opening` is what comes before any text, `usage` the last chunk, `whole` the answer without its log-probabilities.
    """

    def __init__(self, model: str, with_logprobs: bool, n_alternatives: int = 0) -> None:
        self.n_alternatives = n_alternatives
        self.id, self.model, self.created = f"cmpl-{secrets.token_hex(12)}", model, int(time.time())
        self.with_logprobs = with_logprobs

    def opening(self) -> list[BaseModel]:
        """Nothing comes before the text."""
        return []

    def chunk(self, piece: Piece) -> BaseModel:
        """Return a completion of this piece alone."""
        return self._completion([self._choice(piece)])

    def usage(self, usage: Usage) -> BaseModel:
        """Return a completion without a choice."""
        return self._completion([], usage)

    def whole(self, text: str, finish: Finish, usage: Usage) -> BaseModel:
        """Return the completion."""
        return self._completion([schema.TextChoice(text=text, finish_reason=finish)], usage)

    def logprobs(self, sampled: Sequence[SampledToken]) -> schema.TextLogprobs | None:
        """Return a list for each kind of value."""
        if not self.with_logprobs:
            return None
        return schema.TextLogprobs(
            tokens=[one.text for one in sampled],
            token_logprobs=[one.logprob for one in sampled],
            text_offset=[one.offset for one in sampled],
            top_logprobs=[_by_text(one) for one in sampled] if self.n_alternatives else None,
        )

    def _choice(self, piece: Piece) -> schema.TextChoice:
        return schema.TextChoice(text=piece.text, logprobs=self.logprobs(piece.sampled), finish_reason=piece.finish)

    def _completion(self, choices: list[schema.TextChoice], usage: Usage | None = None) -> BaseModel:
        return schema.Completion(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)


class ChatShape:
    """The form of /v1/chat/completions; blanks before the first word are left out, as `caramba chat` does."""

    def __init__(self, model: str, with_logprobs: bool) -> None:
        self.id, self.model, self.created = f"chatcmpl-{secrets.token_hex(12)}", model, int(time.time())
        self.with_logprobs, self.is_begun = with_logprobs, False

    def opening(self) -> list[BaseModel]:
        """Return the chunk that names the role."""
        return [self._chunk([schema.DeltaChoice(delta=schema.Delta(role="assistant", content=""))], None)]

    def chunk(self, piece: Piece) -> BaseModel:
        """Return the chunk of a piece."""
        text = piece.text if self.is_begun else piece.text.lstrip()
        self.is_begun = self.is_begun or bool(text)
        choice = schema.DeltaChoice(
            delta=schema.Delta(content=text or None),
            logprobs=self.logprobs(piece.sampled),
            finish_reason=piece.finish,
        )
        return self._chunk([choice], None)

    def usage(self, usage: Usage) -> BaseModel:
        """Return a chunk without a choice."""
        return self._chunk([], usage)

    def whole(self, text: str, finish: Finish, usage: Usage) -> BaseModel:
        """Return the turn."""
        choice = schema.ChatChoice(message=schema.AssistantMessage(content=text.lstrip()), finish_reason=finish)
        return schema.ChatCompletion(id=self.id, created=self.created, model=self.model, choices=[choice], usage=usage)

    def logprobs(self, sampled: Sequence[SampledToken]) -> schema.ChatLogprobs | None:
        """Return an entry for each token."""
        if not self.with_logprobs:
            return None
        return schema.ChatLogprobs(
            content=[
                schema.TokenLogprob(
                    token=one.text,
                    logprob=one.logprob,
                    bytes=_bytes(one.text),
                    top_logprobs=[
                        schema.TopLogprob(token=other.text, logprob=other.logprob, bytes=_bytes(other.text))
                        for other in one.alternatives
                    ],
                )
                for one in sampled
            ]
        )

    def _chunk(self, choices: list[schema.DeltaChoice], usage: Usage | None) -> BaseModel:
        return schema.ChatChunk(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)


Shape = TextShape | ChatShape
"""How an answer is written: whole, or in chunks."""


def _by_text(sampled: SampledToken) -> dict[str, float]:
    found: dict[str, float] = {}
    for other in sampled.alternatives:
        is_taken = other.text in found or (other.text == sampled.text and other.id != sampled.id)
        found[f"token_id:{other.id}" if is_taken else other.text] = other.logprob
    return found if sampled.text in found else found | {sampled.text: sampled.logprob}


def _bytes(text: str) -> list[int] | None:
    """Return a token's bytes; None for a part of a character, whose text is not those bytes."""
    return None if "\ufffd" in text else list(text.encode())
