"""Perplexity on disjoint held-out windows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from caramba.config.benchmark import PerplexityBenchmarkConfig
from caramba.data import (
    IGNORED,
    TokenDataset,
    batches,
    count_bytes,
    documents_of,
    open_benchmark_text,
    spread_windows,
)
from caramba.errors import CarambaError, ConfigError
from caramba.evaluation.subject import Subjects
from caramba.infer.agreement import CHUNK
from caramba.infer.nll import WindowedNLL, windowed_nll
from caramba.model import Model
from caramba.ops.backend import upcast
from caramba.result import WINDOW_NLL, Metric
from caramba.runtime.device import wide_dtype


class CachedModel(nn.Module):
    """A model whose forward reads each sequence through a fresh cache, a chunk at a time.

    Chunks of `cache_tail_tokens` quantise what single tokens would: at the start of a chunk the tail is one whole tile,
    which becomes blocks.

    Shape: tokens [B, T] int64 to logits [B, T, V].

    Raises:
        ConfigError: windows with separate documents, which a cache does not support.
    """

    def __init__(self, model: Model, config: PerplexityBenchmarkConfig) -> None:
        super().__init__()
        assert config.cache_kind is not None
        self.model, self.config, self.kind = model, config, config.cache_kind

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        if documents is not None:
            raise ConfigError(
                f"benchmark: cache_kind={self.kind} reads windows of one stream, and data.packing=best_fit keeps the "
                "separate documents of a window; remove cache_kind, or use packing: concat or a dataset of its own"
            )
        chunk = self.config.cache_tail_tokens
        batch, n_tokens = tokens.shape
        ctx = self.model.new_context(
            batch, n_tokens, self.kind, static=True, tail_tokens=chunk, hadamard=self.config.cache_hadamard
        )
        return torch.cat([self.model(part, ctx) for part in tokens.split(chunk, dim=1)], dim=1)


def perplexity(
    config: PerplexityBenchmarkConfig, subjects: Subjects, source: str
) -> tuple[list[Metric], list[dict[str, Any]]]:
    """Measure NLL (nats a token), perplexity, bits per byte and the number of distinct tokens predicted, per model.

    `standard_error` of nll is that of its mean over windows; that of perplexity and bits per byte follows to first
    order. Bits per byte counts the bytes of exactly the tokens that were predicted. With `cache_kind` the metrics carry
    `kind=`, and every figure is that of reading through such a cache.

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
    text_bytes = count_predicted_bytes(dataset, wanted, token_bytes)
    given = f"@kind={config.cache_kind}" if config.cache_kind else ""
    metrics: list[Metric] = []
    rows: list[dict[str, Any]] = []
    for name, model in subjects.models.items():
        measured = windowed_nll(
            CachedModel(model, config) if config.cache_kind else model,
            dataset,
            windows=wanted,
            batch_size=config.batch_size,
            device=subjects.device,
        )
        if not math.isfinite(measured.mean):
            raise CarambaError(f"{name}: the held-out NLL is {measured.mean}; its training diverged, lower lr")
        values = summarise(measured, text_bytes)
        n = len(measured.window_means)
        for key, (value, unit, error) in values.items():
            metrics.append(Metric(f"perplexity.{name}.{key}{given}", value, unit, n, None, source, error))
        rows.append(
            {"model": name}
            | {key: value for key, (value, _, _) in values.items()}
            | {
                "windows": n,
                "block_size": config.block_size,
                "kind": config.cache_kind.value if config.cache_kind else None,
                "tail_tokens": config.cache_tail_tokens if config.cache_kind else None,
                "hadamard": config.cache_hadamard if config.cache_kind else None,
                "nll_standard_error": _or_none(measured.standard_error),
                "text_bytes": text_bytes,
                WINDOW_NLL: list(measured.window_means),
            }
        )
    return metrics, rows


def summarise(measured: WindowedNLL, text_bytes: int | None) -> dict[str, tuple[float, str, float | None]]:
    """Return field -> (value, unit, standard error) of one model's measurement."""
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


def count_predicted_bytes(dataset: TokenDataset, wanted: int, token_bytes: np.ndarray | None) -> int | None:
    """Return the UTF-8 bytes of the targets in the measured windows; None when the tokenizer is not known."""
    if token_bytes is None:
        return None
    targets = (dataset[index][1] for index in spread_windows(len(dataset), wanted))
    return sum(count_bytes(y[y != IGNORED], token_bytes) for y in targets)


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


@torch.inference_mode()
def position_nll(model: Model, windows: TokenDataset, n_windows: int, batch_size: int, device: torch.device) -> Tensor:
    """Return the NLL in nats of each target of up to `n_windows` windows, NaN where a target does not count.

    Shape: [windows, T], float64 on the CPU. Logits exist for 1024 tokens at a time.
    """
    losses: list[Tensor] = []
    for batch in batches(windows, spread_windows(len(windows), n_windows), batch_size):
        x, y = batch[0].to(device), batch[1].to(device)
        documents = documents_of(batch)
        hidden = model.hidden(x, documents=None if documents is None else documents.to(device)).flatten(0, 1)
        found = [
            F.cross_entropy(
                upcast(model.logits(hidden[start : start + CHUNK])),
                y.flatten()[start : start + CHUNK],
                reduction="none",
                ignore_index=IGNORED,
            )
            for start in range(0, len(hidden), CHUNK)
        ]
        rows = torch.cat(found).view(y.shape).to(wide_dtype(y.device))
        losses += list(torch.where(y == IGNORED, torch.nan, rows).cpu().double())
    return torch.stack(losses)
