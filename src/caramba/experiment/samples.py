"""Runs of mode=sample and mode=chat: texts of a model at one point of the experiment, kept in the run directory."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from caramba.config.generate import ChatConfig, SampleConfig
from caramba.config.hf import is_hf_folder, read_hf_config
from caramba.config.manifest import RunConfig
from caramba.console import logger
from caramba.data import Tokenizer
from caramba.errors import ConfigError
from caramba.experiment.session import Session
from caramba.infer import Generator
from caramba.infer.chat_session import ChatSession, Turn, converse, is_terminal, read_lines
from caramba.infer.dialogue import Dialogue, read_template
from caramba.infer.eval_text import EvalText
from caramba.infer.prompts import encode_prompts, refuse_prompts
from caramba.runs.events import append_event
from caramba.runs.files import write_json
from caramba.runtime import is_main_process


def check_samples(session: Session) -> None:
    """Refuse, before anything trains, prompts that the models cannot continue after it.

    Raises:
        ConfigError: data without a tokenizer, a model that the group has none of, or a prompt that does not fit.
    """
    model = session.manifest.model
    for run in session.group.runs:
        if run.sample is None:
            continue
        tokenizer = _check_texts(session, run, run.sample)
        spec = session.teacher.spec if run.sample.role == "teacher" and session.teacher is not None else model
        limits = (run.sample.generate.max_seq_len, spec.embedder.max_positions)
        refuse_prompts(
            encode_prompts(run.sample.prompts, tokenizer),
            vocab_size=spec.embedder.vocab_size,
            max_new_tokens=run.sample.generate.max_new_tokens,
            limit=min((limit for limit in limits if limit is not None), default=None),
        )


def _check_texts(session: Session, run: RunConfig, config: SampleConfig | ChatConfig) -> Tokenizer:
    """Refuse a model that the group has none of, and a text of the cache that cannot be read; return the tokenizer."""
    if config.role == "teacher" and session.teacher is None:
        raise ConfigError(f"run {run.id!r}: {run.mode}.role=teacher, and the model has no teacher; use role: student")
    tokenizer = tokenizer_of(session, run)
    if config.generate.cache_quality_text is not None:
        vocab_size = session.manifest.model.embedder.vocab_size
        EvalText.of_file(config.generate.cache_quality_text, tokenizer, vocab_size)
    return tokenizer


def _generator_of(session: Session, run: RunConfig, config: SampleConfig | ChatConfig, **changes: Any) -> Generator:
    model = session.model_of(config.role).to(session.device)
    seed = run.seed if config.generate.seed is None else config.generate.seed
    held_out = EvalText.of_corpus(session.corpus)
    return Generator(model, tokenizer_of(session, run), config.generate, held_out, seed=seed, **changes)


def _described(
    session: Session, run: RunConfig, config: SampleConfig | ChatConfig, generator: Generator
) -> dict[str, Any]:
    """Return what the file of a run's texts begins with."""
    return {
        "run": run.id,
        "role": config.role,
        "labels": session.labels,
        "config": generator.config.model_dump(mode="json"),
    }


def write_samples(session: Session, run: RunConfig, config: SampleConfig) -> None:
    """Continue every prompt and write samples/RUN.json; without a seed of its own the run's decides."""
    generator = _generator_of(session, run, config)
    rows = generator.generate(config.prompts)
    decision = generator.cache_decision
    if decision is not None:
        logger.info(f"{run.id}: cache_kind=auto chose {decision.kind.value}: {decision.reason}")
    for prompt, row in zip(config.prompts, rows, strict=True):
        logger.info(f"{run.id}: {prompt!r} -> {row.text!r} ({row.finish})")
    if is_main_process():
        file = session.run_dir / "samples" / f"{run.id}.json"
        write_json(
            file,
            {
                **_described(session, run, config, generator),
                "rows": [
                    {"prompt_text": prompt, **dataclasses.asdict(row)}
                    for prompt, row in zip(config.prompts, rows, strict=True)
                ],
                "stats": dataclasses.asdict(generator.stats),
                "cache_policy": None if decision is None else decision.record(),
            },
        )
        logger.path(str(file), "samples")
    append_event(session.run_dir, "sampled", run=run.id, tokens=generator.stats.new_tokens)


def tokenizer_of(session: Session, run: RunConfig) -> Tokenizer:
    """Return the tokenizer of the group's text.

    Raises:
        ConfigError: it names none.
    """
    tokenizer = session.corpus.tokenizer
    if tokenizer is None:
        raise ConfigError(
            f"run {run.id!r}: mode={run.mode} reads text, and the group's data names no tokenizer; use a token folder "
            "(caramba prepare) or stdlib"
        )
    return tokenizer


COMMAND = "/"


def check_chats(session: Session) -> None:
    """Refuse, before anything trains, conversations that cannot run after it.

    Raises:
        ConfigError: data without a tokenizer, a model that the group has none of, a message that does not fit.
    """
    for run in session.group.runs:
        if run.mode != "chat":
            continue
        config = run.chat or ChatConfig()
        tokenizer = _check_texts(session, run, config)
        limit, n_new = _context(session, config), config.generate.max_new_tokens
        if n_new >= limit:
            raise ConfigError(
                f"run {run.id!r}: chat.generate.max_new_tokens={n_new} leaves no room for a message in {limit} tokens "
                f"of context; use max_new_tokens: {max(limit // 2, 1)}, or a larger max_seq_len"
            )
        dialogue = Dialogue(tokenizer, _template(session, config), config.system)
        for message in config.messages:
            if not message.startswith(COMMAND):
                dialogue.reset()
                dialogue.ask(message, limit - n_new)


def run_chat(session: Session, run: RunConfig, config: ChatConfig) -> bool:
    """Hold the conversation, write chats/RUN.json after every answer, and return whether it has ended.

    One that was interrupted resumes after its last answer. Without messages, a terminal or lines there is none to
    hold: it stays open for a later resume.
    """
    file = session.run_dir / "chats" / f"{run.id}.json"
    limit = _context(session, config)
    generator = _generator_of(session, run, config, max_seq_len=limit)
    template = _template(session, config)
    talk = ChatSession(generator, Dialogue(tokenizer_of(session, run), template, config.system))
    talk.remember(_answered(file))
    rest = _unsaid(config.messages, len(talk.turns))

    def keep() -> None:
        write_json(
            file,
            {
                **_described(session, run, config, generator),
                "system": config.system,
                "format": "plain" if talk.dialogue.template is None else "template",
                "turns": [dataclasses.asdict(turn) for turn in talk.turns],
                "stats": dataclasses.asdict(generator.stats),
            },
        )

    converse(talk, _echoed(rest), goes_on=False, after=keep)
    if is_terminal() or not config.messages:
        logger.info(f"{run.id}: {limit} tokens of context; /help for help, /quit ends")
        converse(talk, read_lines(), goes_on=True, after=keep)  # a line too long ends no experiment
    if not talk.turns:
        logger.info(f"{run.id}: no messages, no terminal and no lines; caramba resume on a terminal opens it")
        return False
    logger.path(str(file), "chat")
    append_event(session.run_dir, "chatted", run=run.id, turns=len(talk.turns))
    return True


def _answered(file: Path) -> list[Turn]:
    if not file.is_file():
        return []
    return TypeAdapter(list[Turn]).validate_python(json.loads(file.read_text(encoding="utf-8"))["turns"])


def _unsaid(messages: tuple[str, ...], n_said: int) -> list[str]:
    """Return what follows the first `n_said` messages, words that begin with a slash not being counted."""
    counted = itertools.accumulate((not message.startswith(COMMAND) for message in messages), initial=0)
    start = next((index for index, n in enumerate(counted) if n == n_said), len(messages))
    return list(messages[start:])


def _echoed(messages: list[str]) -> Iterator[str]:
    for message in messages:
        print(f"> {message}", flush=True)
        yield message


def _template(session: Session, config: ChatConfig) -> str | None:
    """Return the chat template of the Hugging Face folder that the model began as, if it has one."""
    folder = _folder(session, config)
    return None if folder is None or config.plain else read_template(folder)


def _folder(session: Session, config: ChatConfig) -> Path | None:
    model = session.manifest.model
    teacher = None if model.teacher is None else model.teacher.checkpoint
    source = teacher if config.role == "teacher" else model.path or model.checkpoint or teacher
    folder = None if source is None else Path(source).expanduser()
    return folder if folder is not None and folder.is_dir() and is_hf_folder(folder) else None


def _context(session: Session, config: ChatConfig) -> int:
    """Return the longest conversation in tokens: as configured, else what the models are known for."""
    folder = _folder(session, config)
    stated = None if folder is None else read_hf_config(folder).get("max_position_embeddings")
    known = session.longest()
    return config.generate.max_seq_len or (known if stated is None else min(known, int(stated)))
