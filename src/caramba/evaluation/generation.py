"""Quality of generated text: repetition, distinct n-grams, length, and wins against the teacher by log-likelihood."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from caramba.artifacts.items import to_column
from caramba.artifacts.key import MetricKey
from caramba.config.benchmark import GenerationBenchmarkConfig
from caramba.data import spread_windows
from caramba.errors import DataError
from caramba.evaluation.subject import Subjects
from caramba.infer import Generator, score_continuations
from caramba.model import Model
from caramba.result import ITEMS, Metric

REPEATED = 4
"""The length of the n-grams whose repeats are counted."""
TEACHER = "teacher"
NLL = "continuation_nll"
"""Score of a prompt in items.csv: NLL of its true continuation, in nats a token."""


def generation(
    config: GenerationBenchmarkConfig, subjects: Subjects, source: str
) -> tuple[list[Metric], list[dict[str, Any]]]:
    """Continue held-out texts with each model, and compare how likely each model finds the true continuation.

    A model wins a prompt where its log-likelihood of the next `max_new_tokens` held-out tokens is above the teacher's
    by more than `tie_margin` nats a token, and ties within it. `standard_error` is over prompts.

    Raises:
        DataError: the held-out text has no window of prompt and continuation.
    """
    prompts, truths = _read_texts(config, subjects)
    scored = {name: _score_truths(config, model, prompts, truths) for name, model in subjects.models.items()}
    metrics: list[Metric] = []
    rows: list[dict[str, Any]] = []
    for name, model in subjects.models.items():
        texts = _continue_prompts(config, subjects, model, prompts)
        values: dict[str, list[float]] = {
            "repetition": [measure_repetition(text) for text in texts],
            "distinct_1": [measure_distinct(text, 1) for text in texts],
            "distinct_2": [measure_distinct(text, 2) for text in texts],
            "length": [float(len(text)) for text in texts],
        }
        if name != TEACHER and TEACHER in scored:
            values |= count_wins(scored[name], scored[TEACHER], config.tie_margin)
        for field, per_prompt in values.items():
            key = MetricKey("generation", name, field, {"gen": config.max_new_tokens}).format()
            unit = "tokens" if field == "length" else "share"
            metrics.append(_mean(key, unit, per_prompt, source))
        rows.append(
            {"model": name, "task": "generation", "metric": NLL, "prompts": len(prompts)}
            | {field: statistics.fmean(v) for field, v in values.items()}
            | {ITEMS: to_column(_to_records(prompts, truths, scored[name]), NLL, is_main=True)}
        )
    return metrics, rows


def measure_repetition(tokens: Sequence[int]) -> float:
    """Return the share of n-grams of REPEATED tokens that occurred before in the text; 0 of a shorter text."""
    grams = [tuple(tokens[at : at + REPEATED]) for at in range(len(tokens) - REPEATED + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def measure_distinct(tokens: Sequence[int], n: int) -> float:
    """Return distinct n-grams over all n-grams (distinct-n of Li et al., 2016, arXiv:1510.03055); 0 without any."""
    grams = [tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def count_wins(ours: Sequence[float], theirs: Sequence[float], margin: float) -> dict[str, list[float]]:
    """Return 1 for each prompt won, and for each won or tied, from nats a token."""
    differences = [one - other for one, other in zip(ours, theirs, strict=True)]
    return {
        "win_rate": [float(difference > margin) for difference in differences],
        "win_tie_rate": [float(difference >= -margin) for difference in differences],
    }


def _to_records(prompts: list[list[int]], truths: list[list[int]], scores: Sequence[float]) -> list[dict[str, Any]]:
    """Return one record for each prompt: the NLL of its true continuation, by which any two models are paired."""
    records: list[dict[str, Any]] = []
    for number, (prompt, truth, score) in enumerate(zip(prompts, truths, scores, strict=True)):
        digest = hashlib.sha256(np.array([*prompt, *truth], dtype=np.int64).tobytes()).hexdigest()[:16]
        records.append({"id": str(number), "text_sha256": digest, "cluster": str(number), NLL: -score})
    return records


def _read_texts(config: GenerationBenchmarkConfig, subjects: Subjects) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts and the tokens that follow, from windows spread over the held-out text."""
    dataset = subjects.windows(config.prompt_length + config.max_new_tokens)
    indices = spread_windows(len(dataset), config.num_prompts)
    if not indices:
        raise DataError(
            f"held-out data: no window of prompt_length={config.prompt_length} and max_new_tokens="
            f"{config.max_new_tokens}; use more data, or lower them"
        )
    windows = [[int(token) for token in dataset[index][0].tolist()] for index in indices]
    cut = config.prompt_length
    return [window[:cut] for window in windows], [window[cut:] for window in windows]


def _score_truths(
    config: GenerationBenchmarkConfig, model: Model, prompts: list[list[int]], truths: list[list[int]]
) -> list[float]:
    length = config.prompt_length + config.max_new_tokens
    pairs = list(zip(prompts, truths, strict=True))
    found = score_continuations(model.eval(), pairs, max_length=length, batch_size=config.batch_size)
    return [score.logprob / len(truth) for score, truth in zip(found, truths, strict=True)]


def _continue_prompts(
    config: GenerationBenchmarkConfig, subjects: Subjects, model: Model, prompts: list[list[int]]
) -> list[tuple[int, ...]]:
    generator = Generator(
        model,
        subjects.tokenizer,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
    )
    found: list[tuple[int, ...]] = []
    for start in range(0, len(prompts), config.batch_size):
        batch = prompts[start : start + config.batch_size]
        seeds = range(config.seed + start, config.seed + start + len(batch))
        found += [row.tokens for row in generator.generate(batch, seeds=list(seeds))]
    return found


def _mean(key: str, unit: str, values: list[float], source: str) -> Metric:
    n = len(values)
    error = statistics.stdev(values) / math.sqrt(n) if n > 1 else None
    return Metric(key, statistics.fmean(values), unit, n, None, source, error)
