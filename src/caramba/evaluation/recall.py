"""Recall far behind the window: small models of each attention, trained and scored on key and value pairs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from caramba.cache import MemoryLayerKVCache
from caramba.config.attention import AttentionLayerConfig
from caramba.config.benchmark import RecallBenchmarkConfig
from caramba.config.kvcache import KVCacheKind
from caramba.config.memory_bank import SPARE_TOKENS, MemoryBankLayerConfig
from caramba.config.model import ModelSpec
from caramba.errors import ConfigError
from caramba.evaluation.subject import Subjects
from caramba.infer import prefill
from caramba.layer import MemoryBankLayer
from caramba.model import Model, build_model
from caramba.result import Metric

SYMBOLS = 32
"""Keys, values and fillers, each: the vocabulary is three times as large, and chance one in SYMBOLS."""
IGNORED = -100
PREFILL = 512
"""Tokens of a forward of a context."""
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
    fillers = torch.randint(2 * SYMBOLS, 3 * SYMBOLS, (batch, max(length - 2 * n_pairs, 0)), generator=generator)
    tokens = torch.cat((torch.stack((keys, values), -1).flatten(1), fillers, keys.gather(1, order)), dim=1)
    targets = torch.full_like(tokens, IGNORED)
    targets[:, -n_pairs:] = values.gather(1, order)
    return tokens, targets


def attentions(layer: MemoryBankLayerConfig) -> dict[str, dict[str, Any]]:
    """Return the attention layers that are compared, as nodes: memory, its window alone, a window of the same bytes in
    16 bits, and full attention."""
    memory = layer.model_dump(mode="json")
    own = set(MemoryBankLayerConfig.model_fields) - set(AttentionLayerConfig.model_fields)
    plain = {key: value for key, value in memory.items() if key not in own} | {"type": "AttentionLayer"}
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


def train_probe(spec: ModelSpec, config: RecallBenchmarkConfig, length: int, seed: int, device: torch.device) -> Model:
    """Train a new probe, see `fit_probe`."""
    model = build_model(spec, seed=seed).to(device)
    scale_weights(model)
    return fit_probe(model, config, length, seed, device)


@torch.no_grad()
def scale_weights(model: Model) -> None:
    """Multiply matrices by INIT_SCALE."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.mul_(INIT_SCALE)


def fit_probe(model: Model, config: RecallBenchmarkConfig, length: int, seed: int, device: torch.device) -> Model:
    """Train a probe on fresh rows, with each number of pairs in turn.

    Their length grows to `length` over the first 60% of the steps.
    """
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config.lr, total_steps=config.steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    for step in range(config.steps):
        n_pairs = config.pairs[step % len(config.pairs)]
        shortest = 2 * n_pairs
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


def held_out_rows(config: RecallBenchmarkConfig, n_pairs: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
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
        prefill(model, context, ctx, PREFILL)
        hits["recall"].append(_hits(model(questions, ctx.clone()), answers))
        caches = [cache for cache in ctx.caches if isinstance(cache, MemoryLayerKVCache)]
        if caches and len(tokens) > 1:
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


def recall(config: RecallBenchmarkConfig, subjects: Subjects, source: str) -> tuple[list[Metric], list[dict[str, Any]]]:
    """Train a probe of every attention, number of slots and seed, for each model with memory slots.

    Each is scored with every number of pairs, memory and full attention behind every one of `lengths` too.

    `std` is the deviation over the seeds. A model without memory slots is a row with the reason.
    """
    metrics: list[Metric] = []
    rows: list[dict[str, Any]] = []
    for name, model in subjects.models.items():
        layers = [module.config for module in model.modules() if isinstance(module, MemoryBankLayer)]
        if not layers:
            rows.append({"model": name, "skipped": "it has no MemoryBankLayer"})
            continue
        given = layers[0].slots if config.memory_slots is None else config.memory_slots
        first, *others = (given,) if isinstance(given, int) else given
        trained: list[_Trained] = []
        for slots in (first, *others):
            layer = _with_sizes(layers[0], config, slots)
            for kind, node in attentions(layer).items():
                has_slots = kind in ("memory", "window_equal_bytes")  # others are the same for every number
                if kind in config.attentions and (has_slots or slots == first):
                    own = slots if has_slots and others else None
                    trained.append(_Trained(kind, node, layer, own, config, subjects.device))
        for each in trained:
            for n_pairs in config.pairs:
                length, device = each.length(config), subjects.device
                found = [score(probe, config, n_pairs, length, device) for probe in each.probes]
                where = {"attention": each.kind, "pairs": n_pairs} | each.conditions
                sizes = {"length": length, "window": each.node["local_window"], "chance": 1 / SYMBOLS}
                rows += [{"model": name, "seed": seed} | where | sizes | x for seed, x in enumerate(found)]
                metrics += _metrics(found, f"recall.{name}", where, source)
        for where, found in _far_back(config, trained, subjects.device):
            rows += [{"model": name, "seed": seed, "chance": 1 / SYMBOLS} | where | x for seed, x in enumerate(found)]
            metrics += _metrics(found, f"recall.{name}", where, source)
    return metrics, rows


class _Trained:
    def __init__(
        self,
        kind: str,
        node: dict[str, Any],
        layer: MemoryBankLayerConfig,
        slots: int | None,
        config: RecallBenchmarkConfig,
        device: torch.device,
    ) -> None:
        self.kind, self.node, self.layer = kind, node, layer
        self.conditions = {} if slots is None else {"slots": slots}
        spec = probe_spec(node, layer.d_model, config.blocks)
        self.probes = [train_probe(spec, config, self.length(config), seed, device) for seed in range(config.seeds)]

    def length(self, config: RecallBenchmarkConfig) -> int:
        """Tokens of a row before its questions."""
        assert self.layer.local_window is not None
        return config.windows * self.layer.local_window

    def with_window(self, window: int, config: RecallBenchmarkConfig) -> list[Model]:
        """Return models of the same weights and another window."""
        spec, models = probe_spec(self.node | {"local_window": window}, self.layer.d_model, config.blocks), []
        for probe in self.probes:
            model = build_model(spec).to(probe.embedder.token.weight.device).eval()
            model.load_state_dict(probe.state_dict())
            models.append(model)
        return models


def _far_back(
    config: RecallBenchmarkConfig, trained: list[_Trained], device: torch.device
) -> Iterator[tuple[dict[str, Any], list[dict[str, float]]]]:
    """Yield conditions and scores, one a seed, of full attention at every length and of memory at every ratio.

    Window and slots are `length` / ratio tokens: the most trained slots with which the window is no shorter than in
    training. A state too small for any is left out.
    """
    n_pairs = min(config.pairs)
    full = next((each for each in trained if each.kind == "full"), None)
    memory = sorted((each for each in trained if each.kind == "memory"), key=lambda each: -each.layer.slots)
    for length in config.lengths:
        rows = max(1, config.context_tokens // length)
        few = config.model_copy(
            update={"batch_size": min(rows, config.batch_size), "eval_batches": -(-rows // config.batch_size)}
        )
        if full is not None:
            found = [score(probe, few, n_pairs, length, device) for probe in full.probes]
            yield {"attention": "full", "length": length, "pairs": n_pairs}, found
        for ratio in config.ratios if length > 2 * n_pairs else ():
            state = length // ratio
            fits = (each for each in memory if state - each.layer.slots >= (each.layer.local_window or 0))
            chosen = next(fits, None)
            if chosen is not None:
                window = state - chosen.layer.slots
                found = [score(model, few, n_pairs, length, device) for model in chosen.with_window(window, config)]
                sizes = {"slots": chosen.layer.slots, "window": window}
                yield (
                    {"attention": "memory", "length": length, "ratio": ratio, "pairs": n_pairs} | sizes,
                    found,
                )


def _with_sizes(layer: MemoryBankLayerConfig, config: RecallBenchmarkConfig, slots: int) -> MemoryBankLayerConfig:
    """Return the layer with this many slots and the window and width that the benchmark asks for."""
    sizes: dict[str, Any] = {
        "local_window": config.local_window or layer.local_window,
        "memory_slots": slots,
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


def _metrics(found: list[dict[str, float]], prefix: str, where: dict[str, Any], source: str) -> list[Metric]:
    units = {"cache_bytes": "bytes"}
    given = "@" + ",".join(f"{key}={value}" for key, value in where.items())
    metrics = []
    for key in found[0]:
        values = torch.tensor([row[key] for row in found], dtype=torch.float64)
        std = values.std().item() if len(found) > 1 else None
        unit = units.get(key, "share")
        metrics.append(Metric(f"{prefix}.{key}{given}", values.mean().item(), unit, len(found), std, source))
    return metrics
