"""`caramba chat RUN|DIR`: a conversation on a terminal, or line by line from a pipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from caramba.config.kvcache import KVCacheKind
from caramba.console import logger
from caramba.errors import ConfigError
from caramba.infer.arguments import Arguments, open_generator, sampling_config
from caramba.infer.dialogue import Dialogue, read_template
from caramba.infer.generate_command import clean, show_decision, speculation
from caramba.infer.generator import Generator
from caramba.infer.opened import OpenedModel
from caramba.infer.speculative import SpeculativeGenerator

HELP = """\
/help   these words
/reset  forget the conversation
/stats  speed and memory so far
/quit   end, as the end of the input does"""


def chat(argv: list[str]) -> int:
    """Run the command and return the exit status.

    Raises:
        ConfigError: a wrong argument or an unknown run; without a terminal also a message that cannot be taken.
    """
    parser = Arguments("chat", "[--system TEXT] [--plain]")
    parser.add_argument("--system")
    parser.add_argument("--plain", action="store_true")
    words = parser.parse_args(argv)
    words.command = "chat"
    logger.quiet = words.quiet
    config = sampling_config(words)
    opened, generator = open_generator(words, config)
    assert generator.tokenizer is not None
    dialogue = Dialogue(generator.tokenizer, _template(opened, words), words.system)
    style = (
        "the tokenizer's chat template" if dialogue.template is not None else "lines of User: and Assistant:"
    )
    logger.info(f"{opened.path}: {style}, {generator.config.max_seq_len} tokens of context; /help for help")
    session = ChatSession(generator, dialogue)
    for line in _lines():
        if not line.strip():
            continue
        if line.startswith("/"):
            if line.strip() in ("/quit", "/exit"):
                break
            session.command(line.strip())
            continue
        try:
            session.say(line)
        except ConfigError as error:
            if not sys.stdin.isatty():
                raise
            logger.error(str(error))
    return 0


class ChatSession:
    """A conversation with one model. Turn t draws with seed + t, so the same lines give the same answers."""

    def __init__(self, generator: Generator, dialogue: Dialogue) -> None:
        self.generator, self.dialogue = generator, dialogue
        stop = (*generator.config.stop, *dialogue.stop)
        generator.config = generator.config.model_copy(update={"stop": stop})
        self.turns = self.tokens = self.context = 0
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
                [ids], seeds=[config.first_seed + self.turns], on_text=_Printer()
            )
        except BaseException:
            self.dialogue.withdraw()
            raise
        print(flush=True)
        self._tell_cache()
        answer = (row.text or "").strip()
        self.dialogue.answer(answer)
        stats = self.generator.stats
        self.turns += 1
        self.tokens += stats.new_tokens
        self.seconds += stats.prefill_s + stats.decode_s
        self.context = len(ids) + len(row.tokens)
        return answer

    def _tell_cache(self) -> None:
        """Print the choice of `cache_kind=auto` when it is a new one."""
        decision = self.generator.cache_decision
        chosen = decision and (decision.kind, decision.reason)
        if chosen != self.chosen:
            self.chosen = chosen
            show_decision(self.generator)

    def command(self, word: str) -> None:
        """Do what a word that begins with a slash says."""
        if word == "/help":
            print(HELP, flush=True)
        elif word == "/reset":
            self.dialogue.reset()
            self.context = 0
            print("the conversation is forgotten", flush=True)
        elif word == "/stats":
            print(self.stats(), flush=True)
        else:
            print(f"{clean(word)} is no command; /help lists them", flush=True)

    def stats(self) -> str:
        """Return speed and memory as one line."""
        last, rate = self.generator.stats, self.tokens / self.seconds if self.seconds else 0.0
        return (
            f"{self.turns} turns, {self.tokens} tokens at {rate:.1f} tok/s (last {last.tokens_per_second:.1f}), "
            f"{last.cache_kind} cache {last.cache_bytes} bytes, "
            f"context {self.context} of {self.generator.config.max_seq_len} tokens"
            + (f"; {speculation(self.generator)}" if isinstance(self.generator, SpeculativeGenerator) else "")
        )


class _Printer:
    """Prints pieces of an answer, without the blanks before its first word."""

    def __init__(self) -> None:
        self.is_begun = False

    def __call__(self, row: int, text: str) -> None:
        text = clean(text) if self.is_begun else clean(text).lstrip()
        self.is_begun = self.is_begun or bool(text)
        sys.stdout.write(text)
        sys.stdout.flush()


def _lines() -> Iterator[str]:
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.rstrip("\n")
        return
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return


def _template(opened: OpenedModel, words: argparse.Namespace) -> str | None:
    if words.plain:
        return None
    place = Path(words.tokenizer).expanduser() if words.tokenizer is not None else opened.path
    folder = place if place.is_dir() else place.parent
    return read_template(folder)
