"""What generation prints on a terminal: clean text, and remarks on steps, cache and speculation."""

import re

import torch

from caramba.config.generate import GenerateConfig
from caramba.console import logger
from caramba.infer.generator import GenerateStats, Generator
from caramba.infer.policy import COLUMNS
from caramba.infer.speculative import SpeculativeGenerator
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
