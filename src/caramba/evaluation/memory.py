"""Bytes of caches, weights and the peak while a prompt is read, from tensors that were allocated."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from caramba.config.benchmark import MemoryBenchmarkConfig
from caramba.config.kvcache import KVCacheKind
from caramba.evaluation.subject import Subjects
from caramba.infer import prefill
from caramba.metrics import AllocationMeter, model_bytes
from caramba.model import Model
from caramba.result import Metric


@torch.inference_mode()
def measure(
    model: Model, length: int, batch: int, kind: KVCacheKind, vocab_size: int, device: torch.device
) -> dict[str, float]:
    """Fill a cache of exactly `length` tokens by prefill and count.

    `kv_bytes_per_token` is what one more token of one sequence takes for good, scales and padding included. Of
    `cache_bytes`, all that is allocated, `tail_bytes` hold tokens that a quantised format still has in 16 bits,
    `first_bytes` first tokens that are kept at full precision besides, a constant per sequence, and `slack_bytes`
    nothing; peak is weights plus the largest sum of live tensors; on CUDA it is the allocator's own peak.
    """
    tokens = torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(0)).to(device)
    weights = model_bytes(model)
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    with AllocationMeter() as meter:
        ctx = model.new_context(batch, length, kind=kind, static=True)
        prefill(model, tokens, ctx)
    peak = torch.cuda.max_memory_allocated(device) - before if on_cuda else meter.peak
    per_token = float(ctx.bytes_per_token)
    return {
        "kv_bytes_per_token": per_token,
        "kv_bytes_per_token_layer": per_token / max(1, len(ctx.caches)),
        "model_bytes": float(weights),
        "peak_bytes": float(weights + peak),
        "cache_bytes": float(ctx.nbytes()),
        "tail_bytes": float(ctx.tail_bytes()),
        "first_bytes": float(ctx.first_bytes()),
        "slack_bytes": float(ctx.nbytes() - ctx.used_bytes()),
    }


def memory(
    config: MemoryBenchmarkConfig, subjects: Subjects, source: str
) -> tuple[list[Metric], list[dict[str, Any]]]:
    """Count bytes per model, sequence length and cache format."""
    metrics: list[Metric] = []
    rows: list[dict[str, Any]] = []
    for length, kind in itertools.product(config.sequence_lengths, config.quantization_modes):
        for name, model in subjects.models.items():
            values = measure(
                model.eval(), length, config.batch_size, kind, subjects.vocab_size, subjects.device
            )
            rows.append(
                {"model": name, "seq": length, "kind": kind.value, "batch": config.batch_size} | values
            )
            metrics += [
                Metric(
                    f"memory.{name}.{key}@seq={length},kind={kind.value}",
                    values[key],
                    "bytes",
                    1,
                    None,
                    source,
                )
                for key in ("kv_bytes_per_token", "kv_bytes_per_token_layer", "model_bytes", "peak_bytes")
            ]
    return metrics, rows
