"""Runs of mode=sample: text of a model at one point of the experiment, in a file of the run directory."""

from __future__ import annotations

import dataclasses

from caramba.config.generate import SampleConfig
from caramba.config.manifest import RunConfig
from caramba.console import logger
from caramba.data import Tokenizer
from caramba.errors import ConfigError
from caramba.experiment.session import Session
from caramba.infer import Generator
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
        tokenizer = tokenizer_of(session, run)
        if run.sample.role == "teacher" and session.teacher is None:
            raise ConfigError(
                f"run {run.id!r}: sample.role=teacher, and the model has no teacher; use role: student"
            )
        if run.sample.generate.cache_quality_text is not None:
            EvalText.of_file(run.sample.generate.cache_quality_text, tokenizer, model.embedder.vocab_size)
        spec = session.teacher.spec if run.sample.role == "teacher" and session.teacher is not None else model
        limits = (run.sample.generate.max_seq_len, spec.embedder.max_positions)
        refuse_prompts(
            encode_prompts(run.sample.prompts, tokenizer),
            vocab_size=spec.embedder.vocab_size,
            max_new_tokens=run.sample.generate.max_new_tokens,
            limit=min((limit for limit in limits if limit is not None), default=None),
        )


def write_samples(session: Session, run: RunConfig, config: SampleConfig) -> None:
    """Continue every prompt and write samples/RUN.json; without a seed of its own the run's decides."""
    model = session.model_of(config.role).to(session.device)
    seed = run.seed if config.generate.seed is None else config.generate.seed
    held_out = EvalText.of_corpus(session.corpus)
    generator = Generator(model, tokenizer_of(session, run), config.generate, held_out, seed=seed)
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
                "run": run.id,
                "role": config.role,
                "labels": session.labels,
                "config": generator.config.model_dump(mode="json"),
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
