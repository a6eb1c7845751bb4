"""Needles far behind the window, and slots that are left out: small language models trained on text and recall rows.

Usage on a GPU: python scripts/bench/run.py memory_needle --data TOKENS [--seconds 300] [--parts needle resize]
Usage on a CPU: the same without --data, which reads the bytes of the standard library, and with smaller sizes
Several at once: the same with --seeds 1 --seed 0, 1, ... and an --out each, then --join FILES makes one file of them

Of `--rows` rows a step, `--share` are recall rows: text in which key and value pairs are stated and asked for later.
The loss is the mean over text plus the mean over answers. A key is one token of the text's own vocabulary, a value one
of `--values` tokens; keys of the evaluation are never keys in training. Rows are `--windows` windows long, and have at
most `--pairs` pairs, at least a sixth of them, each asked for at most `--asked` times.

`--compiled` is a mode of torch.compile for blocks in training.

- needle: share of values that are found in held-out text, by depth, of one pair and of four, after training with recall
  rows and (`memory`) without; memory, its window alone, and a window of the same cache bytes, `--seeds` each
- resize: held-out loss of twice the slots cut to `--slots` by read mass and by chance, at once and after
  `--tune` more steps, next to a model that always had `--slots`
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from record import Record, Row
from registry import check_names
from summaries import differences, interval, join
from torch import Tensor
from torch.nn import functional as F

from caramba.config.data import DataConfig
from caramba.config.kvcache import KVCacheKind
from caramba.config.memory_bank import MemoryBankLayerConfig
from caramba.config.model import ModelSpec
from caramba.data import open_corpus
from caramba.data.folder import Tokens
from caramba.evaluation.recall import attentions
from caramba.model import Model, build_model
from caramba.model.topology import compilable_regions
from caramba.optim.groups import is_stack_matrix, parameter_groups

OPTIONS = (
    "--data= --parts=* --d-model=320 --heads=5 --blocks=4 --window=32 --windows=16 --slots=32 --values=64 --pairs=24 "
    "--asked=8 --rows=60 --share=0.05 --steps=800 --tune=100 --lr=0.002 --seed=0 --seeds=3 --items=32 "
    "--compiled=no|default|reduce-overhead --only=* --join=* --seconds=300"
)
SMOKE_OPTIONS = (
    "--d-model 16 --heads 2 --blocks 1 --window 4 --windows 12 --slots 4 --values 4 --pairs 2 --rows 4 --share 0.25 "
    "--steps 2 --tune 1 --seeds 1 --items 1"
)
PARTS = ("needle", "resize")
SIZES = ("d_model", "heads", "blocks", "window", "windows", "slots", "pairs", "asked", "rows", "share", "steps", "tune")
DEPTHS = (10, 30, 50, 70, 90)
FEWEST = 20
"""Times that a token occurs in the text, at least, if it is a key or a value: rarer ones have no trained embedding."""
CELL = 3
INIT = 0.8
"""Standard deviation of initial matrices, times the root of the width: recall is learned late from smaller ones."""


class Rows:
    """Rows of a text, with or without pairs. Two ids behind the vocabulary state a pair and ask for one."""

    def __init__(self, train: Tokens, held_out: Tokens, vocab: int, options: argparse.Namespace) -> None:
        self.texts = {"train": train, "held_out": held_out}
        self.length = options.windows * options.window
        self.pairs, self.asked = options.pairs, options.asked
        self.stated, self.question, self.vocab = vocab, vocab + 1, vocab + 2
        counts = np.bincount(np.asarray(train[:2_000_000], dtype=np.int64), minlength=vocab)
        known = np.flatnonzero(counts >= FEWEST)
        known = known[np.argsort(-counts[known], kind="stable")]
        self.values, keys = known[: options.values], known[options.values :]
        self.keys = {"train": keys[::2], "held_out": keys[1::2]}

    def text(self, split: str, rows: int, source: np.random.Generator) -> np.ndarray:
        """Return rows of text with their last target, [rows, length + 1]."""
        text = self.texts[split]
        starts = source.integers(len(text) - self.length - 1, size=rows)
        return np.stack([np.asarray(text[at : at + self.length + 1], dtype=np.int64) for at in starts])

    def recall(self, rows: int, source: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return training rows with pairs, and which of their tokens are answers, each [rows, length + 1]."""
        tokens = self.text("train", rows, source)
        is_answer = np.zeros(tokens.shape, dtype=bool)
        n_cells = tokens.shape[1] // CELL
        for row, answers in zip(tokens, is_answer, strict=True):
            pairs = source.integers(max(self.pairs // 6, 1), self.pairs + 1)
            places = min(1 + self.asked, n_cells // pairs)
            cells = source.permutation(n_cells)[: pairs * places].reshape(pairs, places)
            keys = source.choice(self.keys["train"], pairs, replace=False)
            for key, where in zip(keys, np.sort(cells, axis=1) * CELL, strict=True):
                value = source.choice(self.values)
                for place, at in enumerate(where):
                    row[at : at + CELL] = (self.question if place else self.stated, key, value)
                    answers[at + CELL - 1] = place > 0
        return tokens, is_answer

    def needles(self, depth: int, others: int, rows: int, source: np.random.Generator) -> np.ndarray:
        """Return held-out rows that state a pair at a depth in percent, `others` elsewhere, and end with its value."""
        tokens = self.text("held_out", rows, source)[:, : self.length]
        last = self.length // CELL - 1
        at = min(round(depth / 100 * last), last - 1)
        free = np.array([cell for cell in range(last) if cell != at])
        for row in tokens:
            keys = source.choice(self.keys["held_out"], 1 + others, replace=False)
            values = source.choice(self.values, 1 + others)
            cells = [at, *source.permutation(free)[:others]]
            for cell, key, value in zip(cells, keys, values, strict=True):
                row[cell * CELL : (cell + 1) * CELL] = (self.stated, key, value)
            row[-CELL:] = (self.question, keys[0], values[0])
        return tokens


def open_rows(options: argparse.Namespace) -> Rows:
    data = {"type": "tokens", "path": options.data} if options.data else {"type": "stdlib", "tokenizer": "byte"}
    corpus = open_corpus(DataConfig.model_validate(data | ({} if options.data else {"max_bytes": 1_000_000})))
    vocab = corpus.vocab_size or 1 + max(corpus.max_ids)
    return Rows(corpus.train, corpus.val, vocab, options)


def layer_of(options: argparse.Namespace, slots: int) -> MemoryBankLayerConfig:
    heads = {"mode": "gqa", "n_heads": options.heads, "n_kv_heads": options.heads}
    sizes = {"d_model": options.d_model, "local_window": options.window, "memory_slots": slots}
    return MemoryBankLayerConfig.model_validate(heads | sizes)


def build(options: argparse.Namespace, attention: dict[str, Any], vocab: int, seed: int) -> Model:
    norm = {"type": "RMSNormLayer", "d_model": options.d_model}
    mlp = {"type": "SwiGLULayer", "d_model": options.d_model, "d_ff": 64 * math.ceil(options.d_model * 8 / 3 / 64)}
    block = [{"type": "ResidualTopology", "layers": [norm, layer]} for layer in (attention, mlp)]
    blocks = {"type": "NestedTopology", "repeat": options.blocks, "layers": block}
    spec = {
        "embedder": {"vocab_size": vocab, "d_model": options.d_model},
        "topology": {"type": "StackedTopology", "layers": [blocks, norm]},
        "head": {"tied": True},
    }
    model = build_model(ModelSpec.model_validate(spec), seed=seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_stack_matrix(name, parameter):
                parameter.mul_(INIT / math.sqrt(options.d_model) / parameter.std())
    return model


class Training:
    """Steps of one model on rows that depend on the seed and the step alone."""

    def __init__(self, model: Model, rows: Rows, options: argparse.Namespace, seed: int, steps: int) -> None:
        self.model, self.rows, self.seed, self.steps, self.done = model, rows, seed, steps, 0
        self.options, self.device = options, next(model.parameters()).device
        if options.compiled != "no":
            torch._dynamo.reset()
            for region in compilable_regions(model.topology):
                region.forward = torch.compile(region.forward, mode=options.compiled)
        groups = parameter_groups(model.named_parameters(), 0.01)
        self.optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95))
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, options.lr, total_steps=steps + 1, pct_start=0.1, cycle_momentum=False
        )

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def run(self, steps: int, share: float) -> None:
        """Take steps in which this share of the rows are recall rows."""
        self.model.train()
        for step in range(self.done, self.done + steps):
            source = np.random.default_rng((self.seed, step))
            n_recall = round(share * self.options.rows)
            text = self.rows.text("train", self.options.rows - n_recall, source)
            given, is_answer = self.rows.recall(n_recall, source) if n_recall else (text[:0], text[:0] > 0)
            tokens = torch.from_numpy(np.concatenate((text, given))).to(self.device, non_blocking=True)
            places = np.flatnonzero(is_answer[:, 1:]) + len(text) * self.rows.length
            asked = torch.from_numpy(places).to(self.device, non_blocking=True)
            torch.compiler.cudagraph_mark_step_begin()
            with self.autocast():
                hidden = self.model.hidden(tokens[:, :-1]).flatten(0, 1)
                targets = tokens[:, 1:].flatten()
                n_text = len(text) * self.rows.length
                loss = cross_entropy(self.model, hidden[:n_text], targets[:n_text])
                if n_recall:
                    loss = loss + cross_entropy(self.model, hidden[asked], targets[asked])
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
        self.done += steps
        self.model.eval()

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")
    def held_out_loss(self) -> float:
        """Return nats a token of held-out text, the same rows for every model."""
        source, losses = np.random.default_rng(7), []
        for _ in range(self.options.items):
            tokens = torch.from_numpy(self.rows.text("held_out", 4, source)).to(self.device)
            with self.autocast():
                hidden = self.model.hidden(tokens[:, :-1]).flatten(0, 1)
                losses.append(float(cross_entropy(self.model, hidden, tokens[:, 1:].flatten())))
        return sum(losses) / len(losses)

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")
    def found(self, depth: int, others: int) -> float:
        """Return the share of held-out needles whose value is the likeliest token."""
        source, hits = np.random.default_rng((11, depth, others)), []
        for _ in range(self.options.items):
            tokens = torch.from_numpy(self.rows.needles(depth, others, 8, source)).to(self.device)
            with self.autocast():
                logits = self.model.logits(self.model.hidden(tokens[:, :-1])[:, -1])
            hits.append((logits.argmax(-1) == tokens[:, -1]).float().mean().item())
        return sum(hits) / len(hits)


def cross_entropy(model: Model, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model.logits(hidden).float(), targets)


def cache_bytes(model: Model, length: int, window: int | None) -> int:
    """Return the bytes of a sequence in 16 bits, of a window's tokens alone where there is one."""
    return model.new_context(1, min(window or length, length), KVCacheKind.BF16, static=True).nbytes()


def needle(options: argparse.Namespace, rows: Rows, device: torch.device, kind: str, seed: int, text: bool) -> Row:
    """Train one model and ask it for needles."""
    layer = layer_of(options, options.slots)
    node = attentions(layer)[kind]
    model = build(options, node, rows.vocab, seed).to(device)
    training = Training(model, rows, options, seed, options.steps)
    training.run(options.steps, 0.0 if text else options.share)
    of_depths = {str(depth): training.found(depth, 0) for depth in DEPTHS}
    of_four = {str(depth): training.found(depth, 3) for depth in DEPTHS}
    return {
        "attention": kind,
        "trained_on": "text" if text else "recall",
        "seed": seed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "cache_bytes": cache_bytes(model, rows.length, None if kind == "memory" else node["local_window"]),
        "needle": sum(of_depths.values()) / len(DEPTHS),
        "needle_of_4": sum(of_four.values()) / len(DEPTHS),
        "by_depth": of_depths,
        "by_depth_of_4": of_four,
        "loss": training.held_out_loss(),
    }


def resize(options: argparse.Namespace, rows: Rows, device: torch.device, seed: int) -> Iterator[Row]:
    """Cut twice the slots by read mass and by chance, and tune them.

    The native model has `--slots` from the start.
    """
    before, total = options.steps // 2, options.steps // 2 + options.tune
    for cut in ("native", "read_mass", "random"):
        slots = options.slots * (1 if cut == "native" else 2)
        model = build(options, attentions(layer_of(options, slots))["memory"], rows.vocab, seed).to(device)
        training = Training(model, rows, options, seed, total)
        training.run(before, options.share)
        wide = training.held_out_loss()
        if cut != "native":
            source = np.random.default_rng((13, seed))
            use = model.get_memory_stats(torch.from_numpy(rows.text("train", 8, source)).to(device))
            if cut == "random":  # what is read decides, so chance takes its place
                chance = torch.Generator().manual_seed(seed)
                for of_layer in use["layers"].values():
                    of_layer["read_mass"].copy_(torch.rand(of_layer["read_mass"].shape, generator=chance))
            model.resize_memory(options.slots, optimizer=training.optimizer)
        at_once = training.held_out_loss()
        training.run(options.tune, options.share)
        row = {"cut": cut, "seed": seed, "slots": slots, "loss_before": wide, "loss_at_once": at_once}
        yield row | {"loss_tuned": training.held_out_loss()}


def run(options: argparse.Namespace, record: Record) -> None:
    kinds = ("memory", "window_equal_bytes", "window")
    parts, chosen = options.parts or list(PARTS), options.only or list(kinds)
    check_names("--parts", parts, PARTS)
    check_names("--only", chosen, kinds)
    if options.join:
        join(record, options.join, equal=("chance", "sizes"), by=("case", "attention", "trained_on", "cut", "seed"))
        record.save(summary=summarise(record.data["rows"]))
        return
    rows, seeds = open_rows(options), range(options.seed, options.seed + options.seeds)
    record.start(chance=1 / len(rows.values), sizes={key: getattr(options, key) for key in SIZES})
    cases: list[tuple[str, Callable[[], Any]]] = []

    def one(kind: str, seed: int, text: bool) -> list[Row]:
        return [needle(options, rows, record.device, kind, seed, text)]

    if "needle" in parts:
        # The window alone sees no needle: one seed checks the task.
        wanted = [(kind, seed, False) for seed in seeds for kind in chosen if kind != "window" or seed == 0]
        wanted += [("memory", 0, True)] if "memory" in chosen and 0 in seeds else []
        names = (f"needle {kind} {seed}{' of text alone' if text else ''}" for kind, seed, text in wanted)
        cases += [(name, functools.partial(one, *key)) for name, key in zip(names, wanted, strict=True)]
    if "resize" in parts:
        call = functools.partial(resize, options, rows, record.device)
        cases += [(f"resize {seed}", functools.partial(call, seed)) for seed in seeds]
    began = time.monotonic()
    record.measure(cases, options.seconds)
    record.save(summary=summarise(record.data["rows"]), wall_seconds=round(time.monotonic() - began))


def summarise(rows: list[Row]) -> Row:
    """Return means over seeds and paired differences with their 95% intervals; nothing for what was not measured."""

    def by_seed(key: str, **where: str) -> dict[int, float]:
        return {row["seed"]: row[key] for row in rows if key in row and where.items() <= row.items()}

    found: dict[str, dict[int, float]] = {}
    for key in ("needle", "needle_of_4"):
        ours = by_seed(key, attention="memory", trained_on="recall")
        others = by_seed(key, attention="window_equal_bytes", trained_on="recall")
        found |= {f"{key}_memory": ours, f"{key}_memory_minus_window_equal_bytes": differences(ours, others)}
    at_once = [by_seed("loss_at_once", cut=kind) for kind in ("read_mass", "random")]
    tuned = [by_seed("loss_tuned", cut=kind) for kind in ("read_mass", "native")]
    found |= {"loss_read_mass_minus_random": differences(*at_once), "loss_tuned_minus_native": differences(*tuned)}
    return {name: interval(values) for name, values in found.items() if values}
