"""Recall far behind the window: small models of each attention, trained and scored on key and value pairs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from caramba.cache import MemoryLayerKVCache
from caramba.config.benchmark import RecallBenchmarkConfig
from caramba.config.kvcache import KVCacheKind
from caramba.config.memory_bank import SPARE_TOKENS, MemoryBankLayerConfig
from caramba.config.model import ModelSpec
from caramba.errors import ConfigError
from caramba.evaluation.subject import Subjects
from caramba.layer import MemoryBankLayer
from caramba.model import Model, build_model
from caramba.result import Metric

SYMBOLS = 32
"""Keys, values and fillers, each: the vocabulary is three times as large, and chance one in SYMBOLS."""
IGNORED = -100
INIT_SCALE = 5.0
"""What initial matrices are multiplied by: at 0.02, the default, all attentions take far longer to learn the task."""


def draw_rows(batch: int, n_pairs: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return tokens and targets [B, length + n_pairs]: pairs, fillers, then every key once more in another order.

    Targets are the values where a key is asked for, else IGNORED.

    Reference: Arora et al., 2023, arXiv:2312.04927 (multi-query associative recall).
    """
    noise = torch.rand(2, batch, SYMBOLS, generator=generator)
    keys = noise[0].argsort(-1)[:, :n_pairs]
    values = torch.randint(SYMBOLS, 2 * SYMBOLS, (batch, n_pairs), generator=generator)
    order = noise[1, :, :n_pairs].argsort(-1)
    fillers = torch.randint(
        2 * SYMBOLS, 3 * SYMBOLS, (batch, max(length - 2 * n_pairs, 0)), generator=generator
    )
    tokens = torch.cat((torch.stack((keys, values), -1).flatten(1), fillers, keys.gather(1, order)), dim=1)
    targets = torch.full_like(tokens, IGNORED)
    targets[:, -n_pairs:] = values.gather(1, order)
    return tokens, targets


def attentions(layer: MemoryBankLayerConfig) -> dict[str, dict[str, Any]]:
    """Return the attention layers that are compared, as nodes: memory, its window alone, a window of the same bytes in
    16 bits, and full attention."""
    memory = layer.model_dump(mode="json")
    slots = {"memory_slots", "memory_compression_ratio", "max_sequence_length", "memory_rope", "memory_tau"}
    plain = {key: value for key, value in memory.items() if key not in slots} | {"type": "AttentionLayer"}
    assert layer.local_window is not None
    # A slot has 32 bits, twice those of a cached token, and its mass.
    features = layer.dims().qk + layer.dims().v
    slot_tokens = math.ceil(layer.slots * (features + 1) * 4 / (features * 2))
    return {
        "memory": memory,
        "window": plain,
        "window_equal_bytes": plain | {"local_window": layer.local_window + SPARE_TOKENS + slot_tokens},
        "full": plain | {"local_window": None},
    }


def probe_spec(attention: dict[str, Any], d_model: int, n_blocks: int) -> ModelSpec:
    """Return a model of `n_blocks` blocks of this attention and SwiGLU on the task's vocabulary."""
    norm = {"type": "RMSNormLayer", "d_model": d_model}
    mlp = {"type": "SwiGLULayer", "d_model": d_model, "d_ff": 2 * d_model}
    block = [{"type": "ResidualTopology", "layers": [norm, layer]} for layer in (attention, mlp)]
    blocks = {"type": "NestedTopology", "repeat": n_blocks, "layers": block}
    return ModelSpec.model_validate(
        {
            "embedder": {"vocab_size": 3 * SYMBOLS, "d_model": d_model},
            "topology": {"type": "StackedTopology", "layers": [blocks, norm]},
            "head": {"tied": False},
        }
    )


def train_probe(
    spec: ModelSpec, config: RecallBenchmarkConfig, n_pairs: int, length: int, seed: int, device: torch.device
) -> Model:
    """Train a probe on fresh rows, whose length grows to `length` over the first 60% of the steps."""
    model = build_model(spec, seed=seed).to(device).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(INIT_SCALE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.lr, total_steps=config.steps, pct_start=0.1
    )
    generator = torch.Generator().manual_seed(seed)
    shortest = 2 * n_pairs
    for step in range(config.steps):
        share = min(1.0, step / max(1.0, 0.6 * config.steps))
        rows = draw_rows(config.batch_size, n_pairs, shortest + round((length - shortest) * share), generator)
        tokens, targets = (x.to(device) for x in rows)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def held_out_rows(
    config: RecallBenchmarkConfig, n_pairs: int, length: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of rows that are the same for every probe."""
    generator = torch.Generator().manual_seed(2**31)
    for _ in range(config.eval_batches):
        yield draw_rows(config.batch_size, n_pairs, length, generator)


@torch.no_grad()
def score(
    model: Model, config: RecallBenchmarkConfig, n_pairs: int, length: int, device: torch.device
) -> dict[str, float]:
    """Return the share of values that are recalled through the cache, and its bytes.

    `cache_bytes` are of a sequence in 16 bits. With memory slots, `swapped_own` and `swapped_other` are the recall
    of a row's own pairs, and of the other row's, once slots are swapped between rows.
    """
    hits: dict[str, list[float]] = {"recall": [], "swapped_own": [], "swapped_other": []}
    n_bytes = 0.0
    for row in held_out_rows(config, n_pairs, length):
        tokens, targets = (x.to(device) for x in row)
        context, questions, answers = tokens[:, :-n_pairs], tokens[:, -n_pairs:], targets[:, -n_pairs:]
        ctx = model.new_context(len(tokens), tokens.shape[1])
        model(context, ctx)
        hits["recall"].append(_hits(model(questions, ctx.clone()), answers))
        caches = [cache for cache in ctx.caches if isinstance(cache, MemoryLayerKVCache)]
        if caches:
            for cache in caches:
                for x in cache.state:
                    x.copy_(x.roll(1, 0))
            hits["swapped_own"].append(_hits(model(questions, ctx.clone()), answers))
            other = (questions.roll(1, 0), answers.roll(1, 0))
            hits["swapped_other"].append(_hits(model(other[0], ctx), other[1]))
        half = model.new_context(1, tokens.shape[1], KVCacheKind.BF16, static=True)
        n_bytes = float(half.nbytes())
    return {key: sum(found) / len(found) for key, found in hits.items() if found} | {"cache_bytes": n_bytes}


def _hits(logits: Tensor, answers: Tensor) -> float:
    return (logits.argmax(-1) == answers).float().mean().item()


def recall(
    config: RecallBenchmarkConfig, subjects: Subjects, source: str
) -> tuple[list[Metric], list[dict[str, Any]]]:
    """Train and score a probe of every attention, number of pairs and seed, for each model with memory slots.

    `std` is the deviation over the seeds. A model without memory slots is a row with the reason.
    """
    metrics: list[Metric] = []
    rows: list[dict[str, Any]] = []
    for name, model in subjects.models.items():
        layers = [module.config for module in model.modules() if isinstance(module, MemoryBankLayer)]
        if not layers:
            rows.append({"model": name, "skipped": "it has no MemoryBankLayer"})
            continue
        layer = _with_sizes(layers[0], config)
        assert layer.local_window is not None
        length = config.windows * layer.local_window
        for n_pairs in config.pairs:
            for kind, node in attentions(layer).items():
                if kind not in config.attentions:
                    continue
                spec, found = probe_spec(node, layer.d_model, config.blocks), []
                for seed in range(config.seeds):
                    probe = train_probe(spec, config, n_pairs, length, seed, subjects.device)
                    found.append(score(probe, config, n_pairs, length, subjects.device))
                    row = {"model": name, "attention": kind, "pairs": n_pairs, "length": length, "seed": seed}
                    rows.append(row | {"chance": 1 / SYMBOLS} | found[-1])
                metrics += _metrics(found, f"recall.{name}", f"@attention={kind},pairs={n_pairs}", source)
    return metrics, rows


def _with_sizes(layer: MemoryBankLayerConfig, config: RecallBenchmarkConfig) -> MemoryBankLayerConfig:
    """Return the layer with the window, slots and width that the benchmark asks for.

    Raises:
        ConfigError: a width that whole heads do not fill.
    """
    sizes: dict[str, Any] = {
        "local_window": config.local_window or layer.local_window,
        "memory_slots": config.memory_slots or layer.slots,
        "memory_compression_ratio": None,
    }
    if config.d_model is not None:
        head = layer.dims().qk
        if config.d_model % head:
            raise ConfigError(
                f"benchmark recall: d_model={config.d_model} is no multiple of the model's head width of {head}; "
                f"use {max(config.d_model // head, 1) * head}"
            )
        heads = config.d_model // head
        sizes |= {"d_model": config.d_model, "n_heads": heads, "n_kv_heads": heads, "head_dim": head}
    return MemoryBankLayerConfig.model_validate(layer.model_dump(mode="json") | sizes)


def _metrics(found: list[dict[str, float]], prefix: str, given: str, source: str) -> list[Metric]:
    units = {"cache_bytes": "bytes"}
    metrics = []
    for key in found[0]:
        values = torch.tensor([row[key] for row in found], dtype=torch.float64)
        std = values.std().item() if len(found) > 1 else None
        unit = units.get(key, "share")
        metrics.append(Metric(f"{prefix}.{key}{given}", values.mean().item(), unit, len(found), std, source))
    return metrics
