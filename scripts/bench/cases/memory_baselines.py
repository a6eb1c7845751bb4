"""Recall of memory slots, windows, full attention, GSA, Titans and Infini-attention at equal bytes of state.

Usage: python scripts/bench/run.py memory_baselines [--steps 250] [--seeds 3] [--only memory window ...]

Each trains a small model on key and value pairs, asked for `--windows` windows later (`benchmark=memory` has the task).
Bytes are those of a layer's state of one sequence: tokens in 16 bits, memories in 32. Others take at most the bytes of
the memory slots, where their sizes allow that; `over_memory` is the ratio. A package that is missing is skipped with
the reason.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from cases.other_memories import OTHERS, OtherMemory, Shape
from record import Record, Row
from registry import check_names

from caramba.config.benchmark import RecallBenchmarkConfig
from caramba.config.kvcache import KVCacheKind
from caramba.config.memory_bank import MemoryBankLayerConfig
from caramba.evaluation.recall import (
    IGNORED,
    SYMBOLS,
    attentions,
    fit_probe,
    held_out_rows,
    probe_spec,
    scale_weights,
)
from caramba.model import Model, build_model

OPTIONS = (
    "--pairs=4 --windows=16 --window=4 --slots=16 --d-model=64 --heads=2 --blocks=2 --steps=250 --rows=64 --lr=0.003 "
    "--batches=4 --seeds=1 --only=*"
)
SMOKE_OPTIONS = "--steps 2 --rows 4 --batches 1 --windows 4 --pairs 2 --d-model 16"


def layer_of(options: argparse.Namespace) -> MemoryBankLayerConfig:
    return MemoryBankLayerConfig.model_validate(
        {
            "mode": "gqa",
            "d_model": options.d_model,
            "n_heads": options.heads,
            "n_kv_heads": options.heads,
            "local_window": options.window,
            "memory_slots": options.slots,
        }
    )


def state_bytes(kind: str, layer: MemoryBankLayerConfig, length: int) -> int:
    """Return the bytes of a layer's state after `length` tokens: those of a cache of slots, else of the tokens seen."""
    if kind == "memory":
        model = build_model(probe_spec(attentions(layer)[kind], layer.d_model, 1))
        return model.new_context(1, length, KVCacheKind.BF16).nbytes()
    dims = layer.dims()
    seen = attentions(layer)[kind]["local_window"] or length
    return min(seen, length) * dims.n_kv_heads * (dims.qk + dims.v) * 2


def build_probe(
    kind: str, layer: MemoryBankLayerConfig, options: argparse.Namespace, seed: int, most: int
) -> Model:
    """Return an untrained probe; those of other packages keep their own initial weights."""
    nodes = attentions(layer)
    model = build_model(
        probe_spec(nodes.get(kind, nodes["window"]), options.d_model, options.blocks), seed=seed
    )
    scale_weights(model)
    if kind in OTHERS:
        shape = Shape(options.d_model, options.heads, options.window, most)
        torch.manual_seed(seed)
        for name, _ in model.attention_layers():
            model.set_submodule(name, OTHERS[kind].build(shape))
    return model


@torch.no_grad()
def recalled(
    model: Model, config: RecallBenchmarkConfig, n_pairs: int, length: int, device: torch.device
) -> float:
    """Return the share of values that are recalled in whole rows, without a cache."""
    hits = []
    for row in held_out_rows(config, n_pairs, length):
        tokens, targets = (x.to(device) for x in row)
        is_asked = targets != IGNORED
        hits.append((model(tokens).argmax(-1)[is_asked] == targets[is_asked]).double().mean().item())
    return sum(hits) / len(hits)


def run(options: argparse.Namespace, record: Record) -> None:
    layer, device = layer_of(options), record.device
    own = tuple(attentions(layer))
    chosen = options.only or [*own, *OTHERS]
    check_names("--only", chosen, [*own, *OTHERS])
    config = RecallBenchmarkConfig.model_validate(
        {"type": "recall", "pairs": [options.pairs], "steps": options.steps, "batch_size": options.rows}
        | {"lr": options.lr, "eval_batches": options.batches, "blocks": options.blocks}
    )
    length = options.windows * options.window

    most = state_bytes("memory", layer, length)
    record.start(chance=1 / SYMBOLS, length=length, memory_bytes=most)
    for kind in chosen:
        reason = OTHERS[kind].missing(device) if kind in OTHERS else None
        if reason:
            record.add({"attention": kind, "skipped": reason})
            continue
        for seed in range(options.seeds):
            model = build_probe(kind, layer, options, seed, most).to(device)
            others = [module for module in model.modules() if isinstance(module, OtherMemory)]
            n_bytes = others[0].state_bytes if others else state_bytes(kind, layer, length + options.pairs)
            fit_probe(model, config, length, seed, device)
            row: Row = {"attention": kind, "seed": seed, "bytes": n_bytes, "over_memory": n_bytes / most}
            parameters: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
            record.add(row | parameters | {"recall": recalled(model, config, options.pairs, length, device)})
