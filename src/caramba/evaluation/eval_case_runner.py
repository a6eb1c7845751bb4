"""Questions with known answers, put to teacher and student side by side."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from caramba.config.verify import (
    KINDS,
    AccuracyBounds,
    ChoiceLogprobCase,
    EvalCase,
    EvalVerifyConfig,
    IntGreedyCase,
)
from caramba.data import Tokenizer
from caramba.errors import ConfigError, VerificationFailed
from caramba.infer import greedy_until, score_continuations
from caramba.model import Model
from caramba.result import Answer, Case, Check

INTEGER = re.compile(r"[-+]?[0-9]+")
TEACHER, STUDENT = "teacher", "student"


@dataclass(frozen=True)
class EncodedCase:
    """A case as token ids: its prompt, without the `dropped` first tokens that do not fit, and its choices."""

    case: EvalCase
    prompt: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...] = ()
    dropped: int = 0


def encode_cases(
    config: EvalVerifyConfig, tokenizer: Tokenizer, *, vocab_size: int, max_positions: int | None
) -> tuple[EncodedCase, ...]:
    """Turn every case into token ids. It needs no model, so that a run can fail before it trains.

    Args:
        vocab_size: V of the models; max_positions: the longest sequence that both can read, None for no limit.

    Raises:
        ConfigError: a tokenizer or a context window that the models cannot take, or a case that does not fit it.
    """
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"verify eval: tokenizer {tokenizer.name} has {tokenizer.vocab_size} entries, the models {vocab_size}; "
            "leave tokenizer out to take that of the run's data, or name the one that the models were trained with"
        )
    window = config.context_window
    if window is not None and max_positions is not None and window > max_positions:
        raise ConfigError(
            f"verify eval: context_window={window} exceeds the {max_positions} positions that the models have learned; "
            "lower it"
        )
    return tuple(
        _encode(case, tokenizer, window or max_positions, config.max_new_tokens) for case in config.cases
    )


def ask(
    config: EvalVerifyConfig, cases: Sequence[EncodedCase], models: Mapping[str, Model], tokenizer: Tokenizer
) -> tuple[tuple[Check, ...], tuple[Case, ...]]:
    """Put every case to every model; return the checks and each case with its answers.

    An answer of `int_greedy` is the first integer of the greedy text, which ends at the end mark or after
    `max_new_tokens`; that of `choice_logprob` the choice c of the highest log p(c | prompt), over its tokens' number
    where the case asks for it.

    Raises:
        VerificationFailed: a log-probability that is not a number.
    """
    asked: list[Case] = []
    for item in cases:
        case = item.case
        answers = tuple(_answer(item, name, model, config, tokenizer) for name, model in models.items())
        is_choice = isinstance(case, ChoiceLogprobCase)
        asked.append(
            Case(
                id=case.id,
                kind=case.kind,
                prompt=case.prompt,
                expected=case.expected,
                answers=answers,
                choices=case.choices if is_choice else (),
                length_normalized=case.length_normalized if is_choice else None,
                dropped_tokens=item.dropped,
            )
        )
    return _checks(config, asked), tuple(asked)


def first_integer(text: str) -> str | None:
    """Return the first integer of a text in plain form ("+07" is "7"), or None when there is none."""
    found = INTEGER.search(text)
    if found is None:
        return None
    digits = found[0].lstrip("+-").lstrip("0") or "0"
    return f"-{digits}" if found[0][0] == "-" and digits != "0" else digits


def _encode(case: EvalCase, tokenizer: Tokenizer, window: int | None, max_new_tokens: int) -> EncodedCase:
    prompt = with_start(tokenizer, tokenizer.encode(case.prompt))
    if isinstance(case, IntGreedyCase):
        longest, choices = max_new_tokens, ()
    else:
        choices = tuple(encode_continuation(tokenizer, case.prompt, choice) for choice in case.choices)
        longest = max(map(len, choices))
    room = len(prompt) if window is None else window - longest
    if room < 1:
        raise ConfigError(
            f"verify eval: case {case.id!r} needs {longest} tokens for its answer and the context window has {window}; "
            "raise context_window or lower max_new_tokens"
        )
    dropped = max(0, len(prompt) - room)
    return EncodedCase(case, tuple(prompt[dropped:]), choices, dropped)


def with_start(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Put the start mark first where the model wants one; a prompt without any token begins with the end mark."""
    if tokenizer.adds_bos and tokenizer.bos_id is not None:
        return [tokenizer.bos_id, *ids]
    return ids or [tokenizer.eos_id]


def encode_continuation(tokenizer: Tokenizer, prompt: str, choice: str) -> tuple[int, ...]:
    """Return the tokens of a choice as they follow the prompt's, or on its own where the two would merge."""
    before, whole = tokenizer.encode(prompt), tokenizer.encode(prompt + choice)
    follows = whole[: len(before)] == before and len(whole) > len(before)
    return tuple(whole[len(before) :] if follows else tokenizer.encode(choice))


def _answer(
    item: EncodedCase, name: str, model: Model, config: EvalVerifyConfig, tokenizer: Tokenizer
) -> Answer:
    case = item.case
    if isinstance(case, IntGreedyCase):
        new = greedy_until(model, item.prompt, config.max_new_tokens, eos_id=tokenizer.eos_id)
        text = tokenizer.decode(token for token in new if token < tokenizer.vocab_size)
        answer = first_integer(text)
        return Answer(name, answer, answer == case.expected, text)
    longest = len(item.prompt) + max(map(len, item.choices))
    scored = score_continuations(
        model, [(item.prompt, choice) for choice in item.choices], max_length=longest, batch_size=8
    )
    sums, means = tuple(score.logprob for score in scored), tuple(score.per_token for score in scored)
    if not all(map(math.isfinite, sums)):
        raise VerificationFailed(
            f"verify eval: the {name}'s log-probabilities of case {case.id!r} are {sums}; it diverged, lower lr"
        )
    decisive = means if case.length_normalized else sums
    chosen = case.choices[decisive.index(max(decisive))]
    return Answer(name, chosen, chosen == case.expected, None, sums, means)


def _checks(config: EvalVerifyConfig, cases: Sequence[Case]) -> tuple[Check, ...]:
    checks = _accuracy(cases, config.thresholds, "")
    kinds = [kind for kind in KINDS if any(case.kind == kind for case in cases)]
    for kind in (
        kinds if len(kinds) > 1 or any(getattr(config.thresholds, kind).is_set for kind in kinds) else ()
    ):
        chosen = [case for case in cases if case.kind == kind]
        checks += _accuracy(chosen, getattr(config.thresholds, kind), f"_{kind}")
    same = [len({answer.answer for answer in case.answers}) == 1 for case in cases]
    return (*checks, Check("agreement", sum(same) / len(same), None, "share"))


def _accuracy(cases: Sequence[Case], bounds: AccuracyBounds, suffix: str) -> tuple[Check, ...]:
    right = {name: sum(_is_right(case, name) for case in cases) for name in (TEACHER, STUDENT)}
    teacher, student = right[TEACHER] / len(cases), right[STUDENT] / len(cases)
    # One division: 3/4 - 1/2 of binary fractions may exceed the bound that it equals.
    drop = (right[TEACHER] - right[STUDENT]) / len(cases)
    return (
        Check(f"student_accuracy{suffix}", student, bounds.min_student_accuracy, "share", is_minimum=True),
        Check(f"teacher_accuracy{suffix}", teacher, None, "share"),
        Check(f"accuracy_drop{suffix}", drop, bounds.max_accuracy_drop, "share"),
    )


def _is_right(case: Case, model: str) -> bool:
    return any(answer.is_correct for answer in case.answers if answer.model == model)
