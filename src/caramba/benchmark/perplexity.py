"""Perplexity on disjoint held-out windows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from caramba.benchmark.subject import Subjects
from caramba.config.benchmark import PerplexityBenchmarkConfig
from caramba.data import IGNORED, TokenDataset, count_bytes, open_benchmark_text
from caramba.errors import CarambaError
from caramba.measure import WindowedNLL, spread_windows, windowed_nll
from caramba.result import Metric


def perplexity(
    config: PerplexityBenchmarkConfig, subjects: Subjects, source: str
) -> tuple[list[Metric], list[dict[str, Any]]]:
    """Measure NLL (nats a token), perplexity, bits per byte and the number of distinct tokens predicted, per model.

    `std` of nll is the standard error of its mean over windows; that of perplexity and bits per byte follows to first
    order. Bits per byte counts the bytes of exactly the tokens that were predicted.

    Raises:
        DataError: the benchmark's own `dataset` does not fit the model.
    """
    token_bytes = subjects.token_bytes
    if config.dataset:
        text = open_benchmark_text(config.dataset)
        text.check(subjects.vocab_size, config.block_size)
        dataset, token_bytes = TokenDataset(text.tokens, config.block_size), text.token_bytes
    else:
        dataset = subjects.windows(config.block_size)
    wanted = config.num_batches * config.batch_size
    text_bytes = predicted_bytes(dataset, wanted, token_bytes)
    metrics: list[Metric] = []
    rows: list[dict[str, Any]] = []
    for name, model in subjects.models.items():
        measured = windowed_nll(
            model, dataset, windows=wanted, batch_size=config.batch_size, device=subjects.device
        )
        if not math.isfinite(measured.mean):
            raise CarambaError(
                f"{name}: the held-out NLL is {measured.mean}; its training diverged, lower lr"
            )
        values = summarise(measured, text_bytes)
        n = len(measured.window_means)
        for key, (value, unit, std) in values.items():
            metrics.append(Metric(f"perplexity.{name}.{key}", value, unit, n, std, source))
        rows.append(
            {"model": name}
            | {key: value for key, (value, _, _) in values.items()}
            | {
                "windows": n,
                "block_size": config.block_size,
                "nll_standard_error": _or_none(measured.standard_error),
                "text_bytes": text_bytes,
            }
        )
    return metrics, rows


def summarise(measured: WindowedNLL, text_bytes: int | None) -> dict[str, tuple[float, str, float | None]]:
    """Return field -> (value, unit, std) of one model's measurement."""
    error = _or_none(measured.standard_error)
    values: dict[str, tuple[float, str, float | None]] = {
        "nll": (measured.mean, "nats/token", error),
        "perplexity": (measured.perplexity, "", None if error is None else error * measured.perplexity),
        "unique_tokens": (float(measured.tokens), "tokens", None),
    }
    if text_bytes:
        per_byte = measured.tokens / (math.log(2) * text_bytes)
        values["bits_per_byte"] = (
            measured.mean * per_byte,
            "bits/byte",
            None if error is None else error * per_byte,
        )
    return values


def predicted_bytes(dataset: TokenDataset, wanted: int, token_bytes: np.ndarray | None) -> int | None:
    """Return the UTF-8 bytes of the targets in the measured windows; None when the tokenizer is not known."""
    if token_bytes is None:
        return None
    targets = (dataset[index][1] for index in spread_windows(len(dataset), wanted))
    return sum(count_bytes(y[y != IGNORED], token_bytes) for y in targets)


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
