"""A conversation with one model: its turns, its slash commands, and the source of its lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from caramba.config.kvcache import KVCacheKind
from caramba.console import logger
from caramba.errors import ConfigError
from caramba.infer.dialogue import Dialogue
from caramba.infer.generator import Generator
from caramba.infer.speculative import SpeculativeGenerator
from caramba.infer.terminal import describe_speculation, log_cache_choice, without_control

HELP = """\
/help   these words
/reset  forget the conversation
/stats  speed and memory so far
/quit   end, as the end of the input does"""


@dataclass(frozen=True)
class Turn:
    """A message and its answer. `begins` is true if nothing before it was in the model's context."""

    user: str
    assistant: str
    begins: bool
    seed: int
    tokens: tuple[int, ...]
    finish: str


class ChatSession:
    """A conversation with one model. Turn t draws with seed + t, so the same lines give the same answers."""

    def __init__(self, generator: Generator, dialogue: Dialogue) -> None:
        self.generator, self.dialogue = generator, dialogue
        stop = (*generator.config.stop, *dialogue.stop)
        generator.config = generator.config.model_copy(update={"stop": stop})
        self.turns: list[Turn] = []
        self.tokens = self.context = 0
        self.seconds = 0.0
        self.chosen: tuple[KVCacheKind, str] | None = None

    def say(self, text: str) -> str:
        """Print the answer as it comes, remember both turns, and return it.

        Raises:
            ConfigError: the message does not fit.
        """
        config = self.generator.config
        assert config.max_seq_len is not None
        ids, dropped = self.dialogue.ask(text, config.max_seq_len - config.max_new_tokens)
        if dropped:
            logger.info(f"(the oldest {dropped} turns no longer fit the context and are forgotten)")
        try:
            (row,) = self.generator.generate(
                [ids], seeds=[config.first_seed + len(self.turns)], on_text=_Printer()
            )
        except BaseException:
            self.dialogue.withdraw()
            raise
        print(flush=True)
        self._tell_cache()
        answer = (row.text or "").strip()
        begins = len(self.dialogue.turns) == 1
        self.dialogue.answer(answer)
        stats = self.generator.stats
        self.turns.append(Turn(text, answer, begins, row.seed, row.tokens, row.finish))
        self.tokens += stats.new_tokens
        self.seconds += stats.prefill_s + stats.decode_s
        self.context = len(ids) + len(row.tokens)
        return answer

    def remember(self, turns: Iterable[Turn]) -> None:
        """Resume a conversation of these turns."""
        for turn in turns:
            if turn.begins:
                self.dialogue.reset()
            self.dialogue.turns.append({"role": "user", "content": turn.user})
            self.dialogue.answer(turn.assistant)
            self.turns.append(turn)

    def _tell_cache(self) -> None:
        """Print the choice of `cache_kind=auto` when it is a new one."""
        decision = self.generator.cache_decision
        chosen = decision and (decision.kind, decision.reason)
        if chosen != self.chosen:
            self.chosen = chosen
            log_cache_choice(self.generator)

    def command(self, word: str) -> None:
        """Run a slash command."""
        if word == "/help":
            print(HELP, flush=True)
        elif word == "/reset":
            self.dialogue.reset()
            self.context = 0
            print("the conversation is forgotten", flush=True)
        elif word == "/stats":
            print(self.stats(), flush=True)
        else:
            print(f"{without_control(word)} is no command; /help lists them", flush=True)

    def stats(self) -> str:
        """Return speed and memory as one line."""
        last, rate = self.generator.stats, self.tokens / self.seconds if self.seconds else 0.0
        return (
            f"{len(self.turns)} turns, {self.tokens} tokens at {rate:.1f} tok/s (last {last.tokens_per_second:.1f}), "
            f"{last.cache_kind} cache {last.cache_bytes} bytes, "
            f"context {self.context} of {self.generator.config.max_seq_len} tokens, {last.decode} steps"
            + (f" ({last.not_compiled})" if last.not_compiled is not None else "")
            + (
                f"; last answer: {describe_speculation(self.generator)}"
                if isinstance(self.generator, SpeculativeGenerator)
                else ""
            )
        )


class _Printer:
    """Prints pieces of an answer, without the blanks before its first word."""

    def __init__(self) -> None:
        self.is_begun = False

    def __call__(self, row: int, text: str) -> None:
        text = without_control(text) if self.is_begun else without_control(text).lstrip()
        self.is_begun = self.is_begun or bool(text)
        sys.stdout.write(text)
        sys.stdout.flush()


def converse(
    session: ChatSession,
    lines: Iterable[str],
    *,
    goes_on: bool,
    after: Callable[[], None] | None = None,
) -> None:
    """Send every line, run those that are slash commands, until /quit; call `after` each answer.

    Raises:
        ConfigError: a message that cannot be taken; printed instead if the conversation `goes_on`.
    """
    for line in lines:
        if not line.strip():
            continue
        if line.startswith("/"):
            if line.strip() in ("/quit", "/exit"):
                return
            session.command(line.strip())
            continue
        try:
            session.say(line)
        except ConfigError as error:
            if not goes_on:
                raise
            logger.error(str(error))
            continue
        if after is not None:
            after()


def is_terminal() -> bool:
    """Whether the standard input is a terminal."""
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()


def read_lines() -> Iterator[str]:
    """Yield the lines of the standard input, asking for each on a terminal."""
    if sys.stdin is None or sys.stdin.closed:
        return
    if not is_terminal():
        for line in sys.stdin:
            yield line.rstrip("\n")
        return
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
