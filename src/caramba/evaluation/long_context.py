"""Use of what is far back: a pass key, one of several keys, and loss by position."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from caramba.config.benchmark import LongContextBenchmarkConfig
from caramba.data import IGNORED, TokenDataset, Tokenizer
from caramba.errors import ConfigError
from caramba.evaluation.perplexity import position_nll
from caramba.evaluation.subject import Subjects
from caramba.infer.agreement import EDGES
from caramba.model import Model
from caramba.ops.backend import upcast
from caramba.result import Metric

NAMES = (
    *("apple", "river", "table", "green", "stone", "music", "paper", "cloud", "horse", "light"),
    *("chair", "bread", "storm", "glass", "tiger", "ocean", "wheat", "sugar", "plant", "clock"),
    *("train", "metal", "field", "shirt", "grape", "sheep", "brick", "spoon", "piano", "beach"),
)
SEED = 0x10C0
DEPTHS = 5
"""Parts of a row by which answers are counted too, each by the percent of its middle."""


@dataclass(frozen=True)
class Question:
    """A row of tokens that ends with its answer, whose other occurrence begins at `depth` of the filler."""

    task: str
    depth: float
    tokens: tuple[int, ...]
    n_answer: int


def long_context(
    config: LongContextBenchmarkConfig, subjects: Subjects, source: str
) -> tuple[list[Metric], list[dict[str, Any]]]:
    """Measure, for each length: `needle` and `recall`, shares of answers whose every token is the likeliest; the NLL of
    an answer's tokens; and perplexity by position in windows of the longest length.

    A needle is one sentence with five digits in held-out text. Recall asks for one of `pairs` such sentences, each of
    its own name. All models get the same rows.

    Raises:
        ConfigError: data without tokenizer, or learned positions that end before a length.
    """
    if subjects.tokenizer is None:
        raise ConfigError(
            "benchmark long_context: the run's data does not say which tokenizer made it; use a token folder "
            "(caramba prepare)"
        )
    longest = max(config.lengths)
    windows = subjects.windows(longest)
    questions = {length: list(_questions(config, length, windows, subjects.tokenizer)) for length in config.lengths}
    metrics: list[Metric] = []
    rows: list[dict[str, Any]] = []
    for name, model in subjects.models.items():
        limit = model.spec.embedder.max_positions
        if limit is not None and limit < longest:
            raise ConfigError(f"benchmark long_context: {name} has {limit} learned positions, got length {longest}")
        model.eval()
        for length, asked in questions.items():
            scores = _ask(model, asked, config.batch_size, subjects.device)
            for task in ("needle", "recall"):
                of_task = [
                    (question, score) for question, score in zip(asked, scores, strict=True) if question.task == task
                ]
                prefix, where = f"long_context.{name}", f"length={length}"
                metrics += _summary(prefix, task, where, [score for _, score in of_task], source)
                for fifth in range(DEPTHS):
                    there = [score for asked, score in of_task if int(asked.depth * DEPTHS) == fifth]
                    if there:
                        depth = round(100 * (fifth + 0.5) / DEPTHS)
                        metrics += _summary(prefix, task, f"{where},depth={depth}", there, source)
                rows += [
                    {
                        "model": name,
                        "task": task,
                        "length": length,
                        "depth": question.depth,
                        "correct": float(found),
                        "answer_nll": nll,
                    }
                    for question, (found, nll) in of_task
                ]
        for start, end, nll, error in _by_position(model, windows, config, subjects.device):
            key = f"long_context.{name}.perplexity@from={start},to={end},length={longest}"
            perplexity = math.exp(nll)
            metrics.append(Metric(key, perplexity, "", config.windows, None, source, error and error * perplexity))
            rows.append({"model": name, "task": "perplexity", "length": longest, "from": start, "to": end, "nll": nll})
    return metrics, rows


def _summary(prefix: str, task: str, where: str, scores: Sequence[tuple[bool, float]], source: str) -> list[Metric]:
    n = len(scores)
    share, nlls = sum(found for found, _ in scores) / n, [nll for _, nll in scores]
    error = statistics.stdev(nlls) / math.sqrt(n) if n > 1 else None
    return [
        Metric(f"{prefix}.{task}@{where}", share, "", n, None, source, math.sqrt(share * (1 - share) / n)),
        Metric(f"{prefix}.{task}_answer_nll@{where}", statistics.fmean(nlls), "nats", n, None, source, error),
    ]


def _questions(
    config: LongContextBenchmarkConfig, length: int, windows: TokenDataset, tokenizer: Tokenizer
) -> Iterator[Question]:
    """Yield the needles of a length, at evenly spaced depths, then its recalls, each in filler of its own."""
    chooser = random.Random(f"{SEED}:{length}")
    for index in range(config.items):
        depth = (index + 0.5) / config.items
        yield _row("needle", ["pass key"], 0, [depth], index, length, windows, tokenizer, chooser)
    for index in range(config.items):
        names = chooser.sample(NAMES, config.pairs)
        depths = [(place + 0.5) / config.pairs for place in range(config.pairs)]
        labels = [f"code of {name}" for name in names]
        asked = chooser.randrange(config.pairs)
        yield _row("recall", labels, asked, depths, config.items + index, length, windows, tokenizer, chooser)


def _row(
    task: str,
    labels: Sequence[str],
    asked: int,
    depths: Sequence[float],
    index: int,
    length: int,
    windows: TokenDataset,
    tokenizer: Tokenizer,
    chooser: random.Random,
) -> Question:
    answers = [" " + "".join(chooser.choices("0123456789", k=5)) for _ in labels]
    sentences = [
        tokenizer.encode(f"\nThe {label} is{answer}. Remember it.\n")
        for label, answer in zip(labels, answers, strict=True)
    ]
    answer = tokenizer.encode(answers[asked])
    question = tokenizer.encode(f"\nThe {labels[asked]} is")
    room = length - sum(map(len, sentences)) - len(question) - len(answer)
    if room < 1:
        raise ConfigError(
            f"benchmark long_context: {len(labels)} sentences do not fit length {length}; use fewer pairs or longer "
            "lengths"
        )
    targets = windows[index % len(windows)][1]
    filler = targets[targets != IGNORED].tolist()[:room]
    row: list[int] = []
    before = 0
    for depth, sentence in zip(depths, sentences, strict=True):
        at = round(depth * len(filler))
        row += [*filler[before:at], *sentence]
        before = at
    row += [*filler[before:], *question, *answer]
    return Question(task, depths[asked], tuple(row), len(answer))


@torch.inference_mode()
def _ask(
    model: Model, questions: Sequence[Question], batch_size: int, device: torch.device
) -> list[tuple[bool, float]]:
    """Return, for each question, whether every token of the answer is the likeliest, and their mean NLL."""
    found: dict[int, tuple[bool, float]] = {}
    shapes: dict[tuple[int, int], list[int]] = {}
    for place, question in enumerate(questions):
        shapes.setdefault((len(question.tokens), question.n_answer), []).append(place)
    for (_, n_answer), places in shapes.items():
        for start in range(0, len(places), batch_size):
            part = places[start : start + batch_size]
            rows = torch.tensor([questions[place].tokens for place in part], device=device)
            hidden = model.hidden(rows[:, :-1])[:, -n_answer:]
            log_p = F.log_softmax(upcast(model.logits(hidden)), dim=-1)
            targets = rows[:, -n_answer:]
            hits = (log_p.argmax(-1) == targets).all(-1).tolist()
            nlls = -log_p.gather(-1, targets[..., None])[..., 0].mean(-1)
            found |= {place: (hit, nll) for place, hit, nll in zip(part, hits, nlls.tolist(), strict=True)}
    return [found[place] for place in range(len(questions))]


def _by_position(
    model: Model, windows: TokenDataset, config: LongContextBenchmarkConfig, device: torch.device
) -> Iterator[tuple[int, int, float, float | None]]:
    """Yield (first, last, mean NLL, its standard error over windows) of each bin of positions."""
    stacked = position_nll(model, windows, config.windows, config.batch_size, device)
    for start, end in zip(EDGES, (*EDGES[1:], stacked.shape[1]), strict=True):
        means = stacked[:, start:end].nanmean(1) if start < stacked.shape[1] else stacked.new_empty(0)
        means = means[~means.isnan()]
        if len(means):
            error = float(means.std() / math.sqrt(len(means))) if len(means) > 1 else None
            yield start, min(end, stacked.shape[1]) - 1, float(np.mean(means.tolist())), error
