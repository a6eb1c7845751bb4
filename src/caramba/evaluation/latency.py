"""Latency of prefill and decode, timed separately, with the device synchronised around each."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from caramba.config.benchmark import LatencyBenchmarkConfig
from caramba.config.kvcache import KVCacheKind
from caramba.evaluation.subject import Subjects
from caramba.infer import decode_step, prefill
from caramba.lower.lowering import lower
from caramba.model import Model
from caramba.result import Metric
from caramba.runtime import synchronize

UNITS = {"prefill_ms": "ms", "decode_ms": "ms", "ttft_ms": "ms", "itl_ms": "ms", "tok_s": "tokens/s"}


@dataclass(frozen=True)
class Timing:
    """One generation: prefill, time to first token, and each later token's latency, in ms."""

    prefill_ms: float
    ttft_ms: float
    steps_ms: tuple[float, ...]

    def fields(self, batch: int) -> dict[str, float]:
        """Return prefill_ms, decode_ms, ttft_ms, itl_ms (median) and tok_s (decode only, all rows of the batch)."""
        decode_ms = sum(self.steps_ms)
        values = {"prefill_ms": self.prefill_ms, "ttft_ms": self.ttft_ms}
        if self.steps_ms:
            values |= {
                "decode_ms": decode_ms,
                "itl_ms": statistics.median(self.steps_ms),
                "tok_s": 1000.0 * batch * len(self.steps_ms) / decode_ms,
            }
        return values


@torch.inference_mode()
def time_generation(
    model: Model,
    prompt: torch.Tensor,
    new_tokens: int,
    device: torch.device,
    kind: KVCacheKind = KVCacheKind.FP32,
) -> Timing:
    """Generate greedily from prompt [B, T]: the first token comes out of prefill, the others of decode steps."""
    with lower(model, device, "decode"):
        ctx = model.new_context(prompt.shape[0], prompt.shape[1] + new_tokens, kind, static=True)
        synchronize(device)
        start = time.perf_counter()
        logits = prefill(model, prompt, ctx)
        synchronize(device)
        prefilled = time.perf_counter()
        token = logits.argmax(dim=-1, keepdim=True)
        synchronize(device)
        first = time.perf_counter()
        steps = []
        for _ in range(new_tokens - 1):
            before = time.perf_counter()
            token = decode_step(model, token, ctx).argmax(dim=-1, keepdim=True)
            synchronize(device)
            steps.append(1000.0 * (time.perf_counter() - before))
    return Timing(1000.0 * (prefilled - start), 1000.0 * (first - start), tuple(steps))


def latency(
    config: LatencyBenchmarkConfig, subjects: Subjects, source: str
) -> tuple[list[Metric], list[dict[str, Any]]]:
    """Time every model at every (prompt, generation, batch); models take turns within a repetition, so drift hits all.

    Each metric is the median of `timed_runs` generations, `std` their standard deviation; rows add p20 and p80.
    """
    kind = config.cache_kind or KVCacheKind.FP32
    given = f",kind={kind}" if config.cache_kind else ""
    metrics: list[Metric] = []
    rows: list[dict[str, Any]] = []
    for prompt_length, new_tokens, batch in itertools.product(
        config.prompt_lengths, config.generation_lengths, config.batch_sizes
    ):
        prompt = torch.randint(
            subjects.vocab_size, (batch, prompt_length), generator=torch.Generator().manual_seed(0)
        ).to(subjects.device)
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in subjects.models}
        for repetition in range(config.warmup_runs + config.timed_runs):
            for name, model in subjects.models.items():
                timing = time_generation(model.eval(), prompt, new_tokens, subjects.device, kind)
                fields = timing.fields(batch)
                if repetition >= config.warmup_runs:
                    runs[name].append(fields)
        condition = f"prompt={prompt_length},gen={new_tokens},batch={batch}{given}"
        for name, timed in runs.items():
            row: dict[str, Any] = {
                "model": name,
                "prompt": prompt_length,
                "gen": new_tokens,
                "batch": batch,
                "kind": kind.value,
                "runs": len(timed),
            }
            for key, unit in UNITS.items():
                values = [fields[key] for fields in timed if key in fields]
                if not values:
                    continue
                spread = statistics.stdev(values) if len(values) > 1 else None
                metrics.append(
                    Metric(
                        f"latency.{name}.{key}@{condition}",
                        statistics.median(values),
                        unit,
                        len(values),
                        spread,
                        source,
                    )
                )
                p20, p80 = np.percentile(values, [20, 80])
                row |= {key: statistics.median(values), f"{key}_p20": float(p20), f"{key}_p80": float(p80)}
            rows.append(row)
    return metrics, rows
