"""Scores of a model on a suite of one's own, by kind of item, and again under each change of the prompts."""

from __future__ import annotations

import hashlib
import math
import random
import re
import statistics
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from caramba.config.suite_file import (
    CodeItem,
    MatchItem,
    PerturbationName,
    SuiteConfig,
    SuiteFile,
    SuiteItem,
    TextItem,
    read_suite,
)
from caramba.config.verify import ChoiceLogprobCase, IntGreedyCase
from caramba.console import logger
from caramba.data import Tokenizer
from caramba.errors import ConfigError
from caramba.evaluation.generation import measure_distinct, measure_repetition
from caramba.evaluation.local_tasks import TaskScores
from caramba.evaluation.sandbox import Outcome, run_python
from caramba.evaluation.verification import encode_continuation, first_integer, with_start
from caramba.infer import Generator, greedy_until, score_continuations
from caramba.model import Model

TYPO_RATE = 0.1
DISTRACTOR = "The library on the corner opens at nine on weekdays. "


def perturb(name: PerturbationName, prompt: str) -> str:
    """Return a prompt under a change of the given name."""
    seed = hashlib.sha256(f"{name}\0{prompt}".encode()).digest()
    return _CHANGES[name](prompt, random.Random(seed))


def _swap_letters(prompt: str, generator: random.Random) -> str:
    """Swap two inner letters of every tenth word of four letters or more, of at least one word."""
    words = [found for found in re.finditer(r"[^\W\d_]{4,}", prompt) if len(set(found[0][1:-1])) > 1]
    if not words:
        return prompt
    chosen = generator.sample(words, max(1, round(TYPO_RATE * len(words))))
    letters = list(prompt)
    for word in chosen:
        places = [at for at in range(word.start() + 1, word.end() - 2) if letters[at] != letters[at + 1]]
        if places:
            at = generator.choice(places)
            letters[at], letters[at + 1] = letters[at + 1], letters[at]
    return "".join(letters)


def _swap_case(prompt: str, generator: random.Random) -> str:
    return re.sub(r"[^\W\d_]+", lambda word: word[0].upper() if generator.random() < 1 / 3 else word[0], prompt)


def _double_spaces(prompt: str, generator: random.Random) -> str:
    return re.sub(r"(?<=\S) (?=\S)", lambda _: "  " if generator.random() < 1 / 3 else " ", prompt)


def _add_sentence(prompt: str, generator: random.Random) -> str:
    return DISTRACTOR + prompt


_CHANGES: dict[str, Callable[[str, random.Random], str]] = {
    "typos": _swap_letters,
    "case": _swap_case,
    "spaces": _double_spaces,
    "distractor": _add_sentence,
}


Record = dict[str, Any]
CODE, TEXT = "code", "text"
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


@dataclass(frozen=True)
class _Asked:
    """What answers one prompt: a model with its tokenizer, and how many tokens it reads and writes."""

    model: Model
    tokenizer: Tokenizer
    suite: SuiteConfig
    max_length: int
    batch_size: int


def open_suites(names: Sequence[str], *, limit: int | None, allow_code: bool, where: str) -> list[SuiteFile]:
    """Read suites, each with its first `limit` evenly spaced items.

    Raises:
        ConfigError: as `read_suite`, or two suites of one id.
    """
    found: dict[str, SuiteFile] = {}
    for name in names:
        file = read_suite(name, where=where, allow_code=allow_code)
        if file.suite.id in found:
            raise ConfigError(
                f"{where}: {found[file.suite.id].path} and {file.path} have the id {file.suite.id!r}; rename one"
            )
        found[file.suite.id] = file if limit is None else _limited(file, limit)
    return list(found.values())


def count_items(files: Sequence[SuiteFile]) -> list[tuple[str, int]]:
    """Return each part of suites that has right answers, with its number of items."""
    return [(name, len(items)) for file in files for name, kind, items in _parts(file.suite) if kind != TEXT]


def score_suite(
    file: SuiteFile, model: Model, tokenizer: Tokenizer, *, max_length: int, batch_size: int
) -> list[TaskScores]:
    """Ask a model every item: one result for each kind of item, and one more for each change of the prompts.

    `acc` is the share of right answers; under a change also `acc_drop`, the mean over items of the score on the plain
    prompt minus that on the changed one. Code has `pass_at_K` (Chen et al., 2021, arXiv:2107.03374), and text
    `repetition`, `distinct_1`, `distinct_2` and `length`.

    Raises:
        ConfigError: an answer that leaves no room for a prompt.
    """
    suite = file.suite
    asked = _Asked(model.eval(), tokenizer, suite, max_length, batch_size)
    is_written = any(not isinstance(item, ChoiceLogprobCase) for item in suite.data)
    if is_written and max_length <= suite.max_new_tokens:
        raise ConfigError(
            f"suite {suite.id}: max_new_tokens={suite.max_new_tokens} leaves no room for a prompt, the model reads "
            f"{max_length} tokens; lower it"
        )
    found: list[TaskScores] = []
    for name, kind, items in _parts(suite):
        plain = _score(asked, items, [item.prompt for item in items])
        found.append(_summarise(name, kind, plain))
        if kind in (
            CODE,
            TEXT,
        ):  # a changed program is another program, and a text has no right answer to lose
            continue
        for change in suite.perturbations:
            changed = _score(asked, items, [perturb(change, item.prompt) for item in items])
            found.append(_summarise(f"{name}+{change}", kind, changed, plain, change))
    return found


def is_right(item: IntGreedyCase | MatchItem, text: str) -> bool:
    """Whether a continuation holds the right answer."""
    if isinstance(item, IntGreedyCase):
        return first_integer(text) == item.expected
    if item.kind == "exact_match":
        return text.strip() in {answer.strip() for answer in item.answers}
    return normalise(text) in {normalise(answer) for answer in item.answers}


def normalise(text: str) -> str:
    """Return a text without case, punctuation, articles and extra white space."""
    bare = "".join(" " if letter in string.punctuation else letter for letter in text.casefold())
    return " ".join(_ARTICLES.sub(" ", bare).split())


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the chance that one of k of the n programs passes, where c of them do: 1 - C(n - c, k) / C(n, k)."""
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def _limited(file: SuiteFile, limit: int) -> SuiteFile:
    data = file.suite.data
    n = min(limit, len(data))
    kept = tuple(data[index * len(data) // n] for index in range(n))
    return SuiteFile(file.path, file.sha256, file.suite.model_copy(update={"data": kept}))


def _parts(suite: SuiteConfig) -> Iterator[tuple[str, str, list[SuiteItem]]]:
    """Yield name, kind and items of each kind; a suite of one kind has its own name."""
    kinds = list(dict.fromkeys(item.kind for item in suite.data))
    for kind in kinds:
        name = suite.id if len(kinds) == 1 else f"{suite.id}.{kind}"
        yield name, kind, [item for item in suite.data if item.kind == kind]


def _score(asked: _Asked, items: Sequence[SuiteItem], prompts: Sequence[str]) -> list[Record]:
    """Return one record for each item, with its scores; its sum is that of the plain item."""
    choices = [item for item in items if isinstance(item, ChoiceLogprobCase)]
    scored = _score_choices(asked, choices, prompts) if choices else []
    warned: set[str] = set()
    records: list[Record] = []
    for index, (item, prompt) in enumerate(zip(items, prompts, strict=True)):
        known = {"id": item.id, "text_sha256": _sum(item.model_dump_json()), "cluster": _sum(item.prompt)}
        if isinstance(item, ChoiceLogprobCase):
            scores = scored[index]
        elif isinstance(item, CodeItem):
            scores = _run_code(asked, item, warned)
        elif isinstance(item, TextItem):
            new = _continue(asked, prompt, ())
            scores = {
                "repetition": measure_repetition(new),
                "distinct_1": measure_distinct(new, 1),
                "distinct_2": measure_distinct(new, 2),
                "length": float(len(new)),
                "answer": _decode(asked, new),
            }
        else:
            stops = ("\n",) if isinstance(item, MatchItem) else ()
            text = _cut(_decode(asked, _continue(asked, prompt, stops)), asked.suite.stop or stops)
            scores = {"acc": is_right(item, text), "answer": text}
        records.append(known | scores)
    return records


def _score_choices(asked: _Asked, items: Sequence[ChoiceLogprobCase], prompts: Sequence[str]) -> list[Record]:
    pairs: list[tuple[list[int], tuple[int, ...]]] = []
    for item, prompt in zip(items, prompts, strict=True):
        start = with_start(asked.tokenizer, asked.tokenizer.encode(prompt))
        pairs += [(start, encode_continuation(asked.tokenizer, prompt, choice)) for choice in item.choices]
    found = iter(score_continuations(asked.model, pairs, max_length=asked.max_length - 1, batch_size=asked.batch_size))
    records: list[Record] = []
    for item in items:
        scores = [next(found) for _ in item.choices]
        values = [score.per_token if item.length_normalized else score.logprob for score in scores]
        chosen = item.choices[values.index(max(values))]
        records.append(
            {
                "acc": chosen == item.expected,
                "answer": chosen,
                "logprobs": [score.logprob for score in scores],
            }
        )
    return records


def _continue(asked: _Asked, prompt: str, default_stops: Sequence[str]) -> list[int]:
    """Return the tokens of the most likely continuation, up to the first text that stops it."""
    stops = default_stops if asked.suite.stop is None else asked.suite.stop

    def is_done(new: list[int]) -> bool:
        return any(stop in _decode(asked, new) for stop in stops)

    return greedy_until(
        asked.model,
        _fit_prompt(asked, prompt),
        asked.suite.max_new_tokens,
        eos_id=asked.tokenizer.eos_id,
        is_done=is_done if stops else None,
    )


def _fit_prompt(asked: _Asked, prompt: str) -> list[int]:
    """Return the tokens of a prompt; of a long one the last that leave room for the answer."""
    room = asked.max_length - asked.suite.max_new_tokens
    return with_start(asked.tokenizer, asked.tokenizer.encode(prompt))[-room:]


def _decode(asked: _Asked, tokens: Sequence[int]) -> str:
    return asked.tokenizer.decode(token for token in tokens if token < asked.tokenizer.vocab_size)


def _cut(text: str, stops: Sequence[str]) -> str:
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


def _run_code(asked: _Asked, item: CodeItem, warned: set[str]) -> Record:
    code = asked.suite.code
    prompt = _fit_prompt(asked, item.prompt)
    if code.samples == 1 and code.temperature == 0:
        written = [_continue(asked, item.prompt, ())]
    else:
        generator = Generator(
            asked.model,
            asked.tokenizer,
            max_new_tokens=asked.suite.max_new_tokens,
            temperature=code.temperature,
        )
        seeds = range(code.seed, code.seed + code.samples)
        written = []
        for first in range(0, code.samples, asked.batch_size):
            batch = list(seeds[first : first + asked.batch_size])
            written += [list(row.tokens) for row in generator.generate([prompt] * len(batch), seeds=batch)]
    answers = [_cut(_decode(asked, tokens), asked.suite.stop or ()) for tokens in written]
    outcomes = [
        run_python(f"{item.prompt}{answer}\n{item.tests}\n", timeout_s=code.timeout_s, memory_mb=code.memory_mb)
        for answer in answers
    ]
    _warn_open(outcomes, warned)
    n_passed = sum(outcome.is_passed for outcome in outcomes)
    scores = {f"pass_at_{k}": pass_at_k(code.samples, n_passed, k) for k in code.k}
    return scores | {"answer": answers[0], "errors": [outcome.error for outcome in outcomes]}


def _warn_open(outcomes: Sequence[Outcome], warned: set[str]) -> None:
    """Warn once of what this machine does not close to the programs."""
    for outcome in (outcome for outcome in outcomes if outcome.is_passed):
        for what, is_closed in (("network", outcome.is_network_closed), ("files", outcome.are_files_closed)):
            if not is_closed and what not in warned:
                warned.add(what)
                logger.warning(
                    f"suite: this machine does not let a process give up its {what}, so the programs have it; "
                    "run the suite in a container"
                )


def _summarise(
    name: str, kind: str, records: list[Record], plain: list[Record] | None = None, change: str = ""
) -> TaskScores:
    metrics = [key for key, value in records[0].items() if isinstance(value, bool | float)]
    columns: dict[str, list[float]] = {key: [float(record[key]) for record in records] for key in metrics}
    if plain is not None:
        drops = [float(before["acc"]) - after for before, after in zip(plain, columns["acc"], strict=True)]
        columns["acc_drop"] = drops
        records = [record | {"acc_drop": drop} for record, drop in zip(records, drops, strict=True)]
    scores = {key: _mean(values) for key, values in columns.items()}
    return TaskScores(name, kind, metrics[0], len(records), scores, records, change)


def _mean(values: Sequence[float]) -> tuple[float, float | None]:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return statistics.fmean(values), error


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
