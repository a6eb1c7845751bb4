"""Recall of memory slots, windows, full attention, GSA, Titans and Infini-attention at equal bytes of state.

Usage: python scripts/bench/run.py memory_baselines [--steps 250] [--seeds 3] [--only memory window ...] [--seconds 200]

Each trains a small model on key and value pairs, asked for `--windows` windows later (`benchmark=memory` has the task).
Bytes are those of a layer's state of one sequence: tokens in 16 bits, memories in 32. Others take at most the bytes of
the memory slots, where their sizes allow that; `over_memory` is the ratio. A package that is missing is skipped with
the reason, and models that there is no time for are in `left_out`. `summary` has the recall of each over the seeds and
that of the memory slots minus it, paired by seeds, with Student's 95% intervals.

`--join FILES` makes one file of runs of other seeds or attentions that were done at once.

Rows of 16 windows are seen whole through two layers by a window of the same bytes: compare it on `--windows 64`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from record import Record, Row
from registry import check_names
from summaries import differences, interval, join
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

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
    score,
)
from caramba.model import Model, build_model

OPTIONS = (
    "--pairs=4 --windows=16 --window=4 --slots=16 --d-model=64 --heads=2 --blocks=2 --steps=250 --rows=64 --lr=0.003 "
    "--batches=4 --seed=0 --seeds=1 --seconds=600 --only=* --join=*"
)
SMOKE_OPTIONS = "--steps 2 --rows 4 --batches 1 --windows 4 --pairs 2 --d-model 16"


@dataclass(frozen=True)
class Shape:
    """Sizes that a memory has to fit: `max_bytes` of state for a sequence, in 32 bits."""

    d_model: int
    heads: int
    window: int
    max_bytes: int


class OtherMemory(nn.Module):
    """A mixer of another package. Shape: x [B, T, M] to the same; a context is refused, as it has none."""

    def __init__(self, mixer: nn.Module, state_bytes: int) -> None:
        super().__init__()
        self.mixer, self.state_bytes = mixer, state_bytes

    def mix(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, ctx: object = None) -> Tensor:
        if ctx is not None:
            raise ValueError(f"{type(self).__name__}: got a context; run whole rows")
        return self.mix(x)


class GatedSlots(OtherMemory):
    """Gated slot attention of flash-linear-attention, with as many slots as fit the bytes."""

    @classmethod
    def of(cls, shape: Shape) -> GatedSlots:
        from fla.layers.gsa import GatedSlotAttention

        per_slot = 2 * shape.d_model * 4
        slots = max(shape.max_bytes // per_slot, 1)
        layer = GatedSlotAttention(hidden_size=shape.d_model, num_heads=shape.heads, num_slots=slots, layer_idx=0)
        return cls(layer, slots * per_slot)

    def mix(self, x: Tensor) -> Tensor:
        return self.mixer(x)[0]


class Titans(OtherMemory):
    """Neural memory of titans-pytorch: its state is the weights that a text has changed, and their momentum."""

    @classmethod
    def of(cls, shape: Shape) -> Titans:
        from titans_pytorch import NeuralMemory

        def build(width: int) -> Titans:
            layer = NeuralMemory(
                dim=shape.d_model,
                dim_head=width,
                heads=shape.heads,
                chunk_size=shape.window,
                default_model_kwargs={"depth": 1},
            )
            for parameter in layer.parameters():  # those of heads are views of one, which no optimiser can step
                parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
            _, state = layer(torch.randn(1, 4 * shape.window, shape.d_model))
            held = (
                state.weights.values() if hasattr(state.weights, "values") else state.weights,
                state.states,
            )
            return cls(layer, count_bytes([list(held[0]), list(held[1] or ())]))

        return widest(build, shape)

    def mix(self, x: Tensor) -> Tensor:
        return self.mixer(x)[0]


class Infini(OtherMemory):
    """Infini-attention of infini-transformer-pytorch, segments as long as the window, whose tokens count."""

    segment = 1

    @classmethod
    def of(cls, shape: Shape) -> Infini:
        from infini_transformer_pytorch.infini_transformer import CausalAttention

        def build(width: int) -> Infini:
            layer = CausalAttention(shape.d_model, dim_head=width, heads=shape.heads)
            _, _, state = layer(torch.randn(1, shape.window, shape.d_model), return_new_memories=True)
            tokens = shape.window * shape.heads * width * 2 * 2
            memory = cls(layer, count_bytes(state) + tokens)
            memory.segment = shape.window
            return memory

        return widest(build, shape)

    def mix(self, x: Tensor) -> Tensor:
        memories, outputs = None, []
        for part in x.split(self.segment, dim=1):
            out, _, memories = self.mixer(part, past_memories=memories, return_new_memories=True)
            outputs.append(out)
        return torch.cat(outputs, dim=1)


def widest(build: Callable[[int], Any], shape: Shape) -> Any:
    """Return the memory of the widest heads whose state fits the bytes, else that of the narrowest."""
    for width in (128, 64, 32, 16, 8):
        found = build(width)
        if found.state_bytes <= shape.max_bytes:
            return found
    return found


def count_bytes(state: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tree_leaves(state) if isinstance(x, Tensor))


@dataclass(frozen=True)
class Package:
    """What a memory needs: a module to find, what to install, and a device, if it runs on no other."""

    module: str
    install: str
    build: Callable[[Shape], OtherMemory]
    device: str | None = None

    def missing(self, device: torch.device) -> str | None:
        """Return why the memory cannot run here, None if it can."""
        if importlib.util.find_spec(self.module) is None:
            return f"{self.install} is not installed: pip install {self.install}"
        if self.device not in (None, device.type):
            return f"{self.install} runs on {self.device}, not on {device.type}"
        try:
            importlib.import_module(self.module)
        except ImportError as error:
            return f"{self.install} does not load: {error}"
        return None


OTHERS = {
    "gsa": Package("fla", "flash-linear-attention==0.6.0", GatedSlots.of, "cuda"),
    "titans": Package("titans_pytorch", "titans-pytorch==0.5.5", Titans.of),
    "infini": Package("infini_transformer_pytorch", "infini-transformer-pytorch==0.2.1", Infini.of),
}


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


def build_probe(kind: str, layer: MemoryBankLayerConfig, options: argparse.Namespace, seed: int, most: int) -> Model:
    """Return an untrained probe; those of other packages keep their own initial weights."""
    nodes = attentions(layer)
    model = build_model(probe_spec(nodes.get(kind, nodes["window"]), options.d_model, options.blocks), seed=seed)
    scale_weights(model)
    if kind in OTHERS:
        shape = Shape(options.d_model, options.heads, options.window, most)
        torch.manual_seed(seed)
        for name, _ in model.attention_layers():
            model.set_submodule(name, OTHERS[kind].build(shape))
    return model


@torch.no_grad()
def recalled(model: Model, config: RecallBenchmarkConfig, n_pairs: int, length: int, device: torch.device) -> float:
    """Return the share of values that are recalled in whole rows, without a cache."""
    hits = []
    for row in held_out_rows(config, n_pairs, length):
        tokens, targets = (x.to(device) for x in row)
        is_asked = targets != IGNORED
        hits.append((model(tokens).argmax(-1)[is_asked] == targets[is_asked]).double().mean().item())
    return sum(hits) / len(hits)


def run(options: argparse.Namespace, record: Record) -> None:
    if options.join:
        join(record, options.join, equal=("length", "memory_bytes"), by=("attention", "pairs", "seed"))
        record.save(summary=summarise(record.data["rows"]))
        return
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
    record.start(chance=1 / SYMBOLS, length=length, memory_bytes=most, left_out=[])
    missing = {kind: OTHERS[kind].missing(device) if kind in OTHERS else None for kind in chosen}
    for kind in chosen:
        if missing[kind]:
            record.add({"attention": kind, "skipped": missing[kind]})
    for seed in range(options.seed, options.seed + options.seeds):
        for kind in chosen:
            if missing[kind]:
                continue
            if time.monotonic() - record.began > options.seconds:
                record.data["left_out"].append(f"{kind}, seed {seed}: no time left")
                continue
            model = build_probe(kind, layer, options, seed, most).to(device)
            others = [module for module in model.modules() if isinstance(module, OtherMemory)]
            n_bytes = others[0].state_bytes if others else state_bytes(kind, layer, length + options.pairs)
            fit_probe(model, config, length, seed, device)
            row: Row = {"attention": kind, "pairs": options.pairs, "seed": seed, "bytes": n_bytes}
            row |= {"over_memory": n_bytes / most, "parameters": sum(p.numel() for p in model.parameters())}
            row["recall"] = recalled(model, config, options.pairs, length, device)
            if kind == "memory":
                found = score(model, config, options.pairs, length, device)
                row |= {key: found[key] for key in ("swapped_own", "swapped_other")} | {"cached": found["recall"]}
            record.add(row)
            record.save(summary=summarise(record.data["rows"]))


def summarise(rows: list[Row]) -> Row:
    """Return each attention's recall over seeds, and the memory's minus it, each with its 95% interval."""
    by_kind: dict[tuple[int, str], dict[int, float]] = {}
    for row in rows:
        if "recall" in row:
            by_kind.setdefault((row["pairs"], row["attention"]), {})[row["seed"]] = row["recall"]
    summary: Row = {}
    for (pairs, kind), found in by_kind.items():
        of_kind = summary.setdefault(f"pairs={pairs}", {})[kind] = interval(found)
        minus = differences(by_kind.get((pairs, "memory"), {}), found)
        if kind != "memory" and minus:
            of_kind["memory_minus"] = interval(minus)
    return summary
