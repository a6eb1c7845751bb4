"""A conversation with one model: its turns, its slash commands, its lines, and what a terminal shows of them."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from caramba.cache.window import WindowLayerKVCache
from caramba.config.generate import GenerateConfig
from caramba.config.kvcache import EXACT_KINDS, KVCacheKind
from caramba.console import logger
from caramba.errors import CheckpointError, ConfigError
from caramba.infer.dialogue import Dialogue
from caramba.infer.generator import GenerateStats, Generator, SeenText
from caramba.infer.policy import COLUMNS
from caramba.infer.scoring import default_kind
from caramba.infer.speculative import SpeculativeGenerator
from caramba.infer.state_file import load_state, read_conversation, save_state
from caramba.infer.verification import SpeculativeStats

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a model's text must not steer a terminal


def without_control(text: str) -> str:
    """Return a model's text without control characters other than newline and tab."""
    return CONTROL.sub("", text)


def steps_remark(stats: GenerateStats, config: GenerateConfig, device: torch.device) -> str | None:
    """Return why steps did not run as requested, or how to make them faster; None otherwise."""
    if stats.not_compiled is not None:
        is_auto = config.compiled == "auto"
        what = "steps were not captured" if is_auto else f"compiled={config.compiled} was not followed"
        return f"{what}: {stats.not_compiled}"
    if stats.decode == "eager" and device.type == "cuda":
        return "steps ran one kernel after the other; --compiled graph captures them, which is faster"
    return None


def log_cache_choice(generator: Generator) -> None:
    """Print what `cache_kind=auto` chose, why, and all that was measured."""
    decision = generator.cache_decision
    if decision is None:
        return
    facts = decision.facts
    on = f", on {facts['text']}" if facts["windows_of"] else ""  # else the reason is why nothing was measured
    what = f"cache at {facts['batch_size']} x {facts['n_tokens']} tokens{on}"
    logger.table(what, COLUMNS, decision.rows())
    logger.info(f"cache_kind=auto chose {decision.kind.value}: {decision.reason}")
    if decision.plan is not None:
        logger.path(decision.plan, "measured now" if decision.is_measured_now else "measured before")


def describe_speculation(generator: SpeculativeGenerator) -> str:
    """Return how speculation went in the last call, in words."""
    stats, times = generator.stats, generator.speed_up()
    assert isinstance(stats, SpeculativeStats)
    return (
        f"{stats.accepted} of {stats.drafted} drafts accepted ({stats.acceptance_rate:.1%}), "
        f"{stats.tokens_per_step:.2f} tokens a step, {stats.fallbacks} fallbacks"
        + ("" if times is None else f", {times:.2f}x the speed of one token a step")
        + ("" if stats.not_batched is None else f"; rows ran one after another: {stats.not_batched}")
    )


HELP = """\
/help       these words
/reset      forget the conversation
/save FILE  write the conversation and the model's state
/load FILE  continue a conversation that was written
/stats      speed and memory so far
/quit       end, as the end of the input does"""


@dataclass(frozen=True)
class Turn:
    """A message and its answer. `begins` is true if nothing before it was in the model's context."""

    user: str
    assistant: str
    begins: bool
    seed: int
    tokens: tuple[int, ...]
    finish: str


@dataclass(frozen=True)
class Conversation:
    """What a file of `ChatSession.save` holds in addition to the model's state."""

    turns: tuple[Turn, ...]
    system: list[dict[str, str]]
    is_plain: bool
    is_windowed: bool


class ChatSession:
    """A conversation with one model. Turn t draws with seed + t, so the same lines give the same answers.

    Where the generator keeps what it has seen, a turn runs from the end of the prompt before it.
    """

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
        seen = self.generator.seen
        if dropped:
            logger.info(f"(the oldest {dropped} turns no longer fit the context and are forgotten)")
        try:
            (row,) = self.generator.generate([ids], seeds=[config.first_seed + len(self.turns)], on_text=_Printer())
        except BaseException:
            self.dialogue.withdraw()
            self.generator.seen = seen
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

    def save(self, path: Path) -> None:
        """Write the turns, and what the model's context holds after the last prompt.

        Raises:
            ConfigError: nothing is kept, or the file cannot be written.
        """
        seen, generator = self.generator.seen, self.generator
        if seen is None or not self.turns:
            raise ConfigError(
                "chat: /save has no state to write; first get an answer, without speculation and with --cache-kind "
                f"{', '.join(EXACT_KINDS)}"
            )
        conversation = Conversation(
            tuple(self.turns),
            self.dialogue.system,
            is_plain=self.dialogue.template is None,
            is_windowed=any(type(cache) is WindowLayerKVCache for cache in seen.ctx.caches),
        )
        try:
            save_state(path, generator.model, seen.ctx, seen.tokens, conversation)
        except OSError as error:
            raise ConfigError(f"chat: /save cannot write {path} ({error}); choose another file") from None

    def load(self, path: Path) -> None:
        """Continue the conversation of a file that `save` wrote, as if it had not ended, in place of this one.

        Raises:
            ConfigError: the state of another model, dtype, cache format or number of slots, or another chat format or
                system message; this conversation is then as it was.
            CheckpointError: no readable file.
        """
        generator, (found, n_tokens) = self.generator, read_conversation(path, Conversation)
        kind = generator.config.cache_kind or default_kind(generator.model)
        if kind not in EXACT_KINDS or not generator.keeps_seen:
            raise ConfigError(
                f"{path}: a saved conversation continues without speculation, with --cache-kind "
                f"{', '.join(EXACT_KINDS)}; got {kind}"
            )
        for name, here in (("system", self.dialogue.system), ("is_plain", self.dialogue.template is None)):
            there = getattr(found, name)
            if there != here and (name != "system" or here):
                raise ConfigError(
                    f"{path}: the conversation has {name}={there}, got {here}; give --system and --plain as they were"
                )
        if not found.turns:
            raise CheckpointError(f"{path}: the conversation has no turns; save one that has an answer")
        ctx = generator.model.new_context(1, n_tokens, kind, static=True, windowed=found.is_windowed)
        tokens = load_state(path, generator.model, ctx)
        generator.seen = SeenText(ctx, tuple(tokens))
        self.dialogue.system = found.system
        self.dialogue.reset()
        self.turns = []
        self.remember(found.turns)
        self.context = len(tokens) + len(self.turns[-1].tokens)

    def _tell_cache(self) -> None:
        decision = self.generator.cache_decision
        chosen = decision and (decision.kind, decision.reason)
        if chosen != self.chosen:
            self.chosen = chosen
            log_cache_choice(self.generator)

    def command(self, line: str) -> None:
        """Run a slash command.

        Raises:
            ConfigError: a file that cannot be written, or does not fit.
        """
        word, _, file = line.partition(" ")
        if word in ("/save", "/load"):
            if not file.strip():
                raise ConfigError(f"chat: {word} needs a file; write {word} FILE")
            path = Path(file.strip()).expanduser()
            (self.save if word == "/save" else self.load)(path)
            print(f"{len(self.turns)} turns: {without_control(str(path))}", flush=True)
        elif word == "/help":
            print(HELP, flush=True)
        elif word == "/reset":
            self.dialogue.reset()
            self.context, self.generator.seen = 0, None
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
    session: ChatSession, lines: Iterable[str], *, goes_on: bool, after: Callable[[], None] | None = None
) -> None:
    """Send every line, run those that are slash commands, until /quit; call `after` each answer.

    Raises:
        ConfigError: a message that cannot be taken; printed instead if the conversation `goes_on`.
    """
    for line in lines:
        if not line.strip():
            continue
        if line.strip() in ("/quit", "/exit"):
            return
        try:
            if line.startswith("/"):
                session.command(line.strip())
                continue
            session.say(line)
        except (ConfigError, CheckpointError) as error:
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
