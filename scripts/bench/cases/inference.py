"""Tokens per second of whole decodes: short prefixes against a hand-captured static loop, long ones, batches, and
speed against context under the memory bound. Writes JSON after every row, and a plot.

Usage on a GPU: python scripts/bench/run.py inference [--parts short,long,batch,context] [--seconds 420] [--out FILE]
The file is written after every case. The same call again measures the cases that are not in it yet, `--again` all of
its parts again; `--before FILE` continues another file. What was measured on another device, at another commit or
with another torch is measured again. `--size tiny --device cpu` shows that the script works.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import numpy as np
import torch
from cases.static_decode import StaticDecoder
from plots import draw_inference
from record import Record, is_same_machine, machine_facts
from registry import UsageError
from timing import read_rate

from caramba import kernels
from caramba.config.kvcache import KVCacheKind
from caramba.config.quantise import WeightFormat
from caramba.infer import Generator, prefill
from caramba.lower.quantize import format_refusal, quantise_weights
from caramba.model import Model
from caramba.ops.backend import without_kernels
from caramba.runtime import synchronize

# (cache, prompt) of short prefixes, tokens of the long one, (batch, tokens) of the batch, contexts of the curve, and
# new tokens, of the long prefix and of the others.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "short": ((64, 16), (128, 16), (128, 112)),
        "long": 96,
        "batch": (2, 64),
        "contexts": (32, 64),
        "new": 8,
        "new_of_long": 8,
    },
    "1b": {
        "short": ((512, 128), (4096, 128), (4096, 3584)),
        "long": 32768,
        "batch": (32, 8192),
        "contexts": (512, 2048, 8192, 32768, 131072),
        "new": 256,
        "new_of_long": 512,
    },
}
PARTS = ("short", "weights", "long", "batch", "caches", "context")
CHUNK = 2048


@dataclass
class Side:
    """One decoder: `run` returns the seconds of its steps and how many there were."""

    name: str
    run: Callable[[], tuple[float, int]]
    facts: Callable[[], dict[str, Any]]


def ours(name: str, model: Model, batch: int, prompt: int, new: int, **values: Any) -> Side:
    """Return our Generator's decode behind a prompt of random tokens, its prefill not counted."""
    given = {"max_new_tokens": new, "temperature": 0.0, "read_every": new, "prefill_chunk": CHUNK}
    given |= {"max_seq_len": prompt + new} | values
    generator = Generator(model, None, **given)
    source = torch.Generator().manual_seed(0)
    prompts = torch.randint(model.spec.embedder.vocab_size, (batch, prompt), generator=source).tolist()

    def run() -> tuple[float, int]:
        generator.generate(prompts)
        return generator.stats.decode_s, generator.stats.steps

    def facts() -> dict[str, Any]:
        stats = generator.stats
        known = {"ran": stats.decode, "why_not": stats.not_compiled, "cache_kind": stats.cache_kind}
        return known | {"cache_bytes": stats.cache_bytes, "captures_when_timed": stats.captures}

    return Side(name, run, facts)


def by_library(side: Side) -> Side:
    """Return a side whose steps take the library's products, as `<name>, library products`."""

    def run() -> tuple[float, int]:
        with without_kernels("small_batch_linear"):
            return side.run()

    return Side(f"{side.name}, library products", run, side.facts)


@torch.inference_mode()
def peer(
    model: Model, decoder: StaticDecoder, prompt: int, new: int, name: str = "static loop"
) -> tuple[Side, dict[str, Any]]:
    """Return the hand-written loop on the same prompt, and how far its first step's logits are from the model's."""
    source = torch.Generator().manual_seed(0)
    device = model.embedder.token.weight.device
    tokens = torch.randint(model.spec.embedder.vocab_size, (1, prompt), generator=source).to(device)
    kind = KVCacheKind.BF16 if device.type == "cuda" else KVCacheKind.FP32
    ctx = model.new_context(1, prompt + 1, kind, static=True)
    first = prefill(model, tokens, ctx, CHUNK).argmax(-1)
    streams = [tuple(part.clone() for part in held.read().values()) for held in ctx.caches]

    def begin() -> None:
        decoder.fill(streams, first)  # type: ignore[arg-type]

    begin()
    decoder.run(1)
    wanted = model.logits(model.hidden(first[:, None], ctx)[:, -1]).float()
    assert decoder.logits is not None
    error = float((decoder.logits.float() - wanted).norm() / wanted.norm())
    begin()
    decoder.capture()

    def run() -> tuple[float, int]:
        begin()
        synchronize(device)
        began = time.perf_counter()
        decoder.run(new - 1)
        synchronize(device)
        return time.perf_counter() - began, new - 1

    ran = ("compiled " if decoder.is_compiled else "") + ("graph" if device.type == "cuda" else "eager")
    return Side(name, run, lambda: {"ran": ran}), {"peer_error": error}


def time_sides(sides: list[Side], repeats: int, batch: int) -> Iterator[dict[str, Any]]:
    """Yield a row a side: median, middle 60% and all of its tokens per second. Sides take turns, the first untimed."""
    speeds: dict[str, list[float]] = {side.name: [] for side in sides}
    for repetition in range(repeats + 1):
        for side in sides:
            seconds, steps = side.run()
            if repetition:
                speeds[side.name].append(batch * steps / seconds)
    for side in sides:
        found = speeds[side.name]
        p20, p80 = (float(value) for value in np.percentile(found, [20, 80]))
        row = {"side": side.name, "tok_s": statistics.median(found), "p20": p20, "p80": p80, "all": found}
        yield row | side.facts()


class Bench:
    """The cases, each a generator of rows."""

    def __init__(self, size: str, device: torch.device, repeats: int, is_compiled: bool) -> None:
        self.size, self.device, self.repeats, self.is_compiled = size, device, repeats, is_compiled
        self.shapes = SHAPES[size]
        self.form: bool | str = True if is_compiled else "graph"
        self._models: dict[str, Model] = {}
        self._peers: dict[tuple[int, bool], StaticDecoder] = {}

    def model(self, layout: str) -> Model:
        """Return a model, the last two of which are kept."""
        found = self._models.pop(layout, None)
        while found is None and len(self._models) > 1:
            self._models.pop(next(iter(self._models)))
        self._models[layout] = found or models.model_of(self.size, layout, self.device)
        return self._models[layout]

    def kind(self) -> KVCacheKind:
        """Return the 16-bit kind of a GPU, fp32 elsewhere."""
        return KVCacheKind.BF16 if self.device.type == "cuda" else KVCacheKind.FP32

    def cases(self, parts: list[str]) -> Iterator[tuple[str, Callable[[], Iterator[dict[str, Any]]]]]:
        """Yield the name of each case and what measures it."""
        shapes = self.shapes
        if "short" in parts:
            for cache, prompt in shapes["short"]:
                name = f"short, {prompt} tokens in {cache}"
                yield name, lambda cache=cache, prompt=prompt: self.short(cache, prompt)
        if "weights" in parts:
            yield "weights of fewer bits", self.fewer_bits
        if "long" in parts:
            yield f"long, {shapes['long']} tokens", self.long
        if "batch" in parts:
            yield "batch, {} x {}".format(*shapes["batch"]), self.batch
        if "caches" in parts:
            yield "caches, {} x {}".format(*shapes["batch"]), self.caches
        if "context" in parts:
            for context in shapes["contexts"]:
                yield f"context, {context} tokens", lambda context=context: self.context(context)

    def peer(self, cache: int, prompt: int, *, has_reductions: bool = False) -> tuple[Side, dict[str, Any]]:
        """Return the static loop on a prompt; it is compiled once for each cache."""
        model, key = self.model("gqa"), (cache, has_reductions)
        if key not in self._peers:
            self._peers.clear()
            self._peers[key] = StaticDecoder(
                model, 1, cache, is_compiled=self.is_compiled, has_reductions=has_reductions
            )
        name = "static loop, reductions" if has_reductions else "static loop"
        return peer(model, self._peers[key], prompt, self.shapes["new"], name)

    def short(self, cache: int, prompt: int) -> Iterator[dict[str, Any]]:
        """Batch 1, the grouped-query model: our steps and the static loop, in the first case by other products too.

        The static loop reads its whole cache. Ours may hold as many tokens, and takes a cache of the text's bucket.
        """
        model, new = self.model("gqa"), self.shapes["new"]
        sides, limit = [], {"max_seq_len": cache}
        is_first = (cache, prompt) == self.shapes["short"][0]
        if self.is_compiled and is_first:
            sides.append(self.peer(cache, prompt, has_reductions=True)[0])
        static, error = self.peer(cache, prompt)
        captured = ours("captured", model, 1, prompt, new, compiled="graph", **limit)
        sides = [static, captured, *sides]
        if self.is_compiled and is_first:
            again = ours("captured", model, 1, prompt, new, compiled="graph", **limit)
            sides.append(by_library(again))
        if self.is_compiled:
            sides.append(ours("compiled and captured", model, 1, prompt, new, compiled=True, **limit))
        facts = {"part": "short", "layout": "gqa", "batch": 1, "context": prompt, "cache": cache, **error}
        for row in time_sides(sides, self.repeats, 1):
            yield facts | row

    def fewer_bits(self) -> Iterator[dict[str, Any]]:
        """Weights of fewer bits against those of 16, behind the first of the short prefixes, one sequence.

        Steps are captured.
        """
        model, (cache, prompt), new = self.model("gqa"), self.shapes["short"][0], self.shapes["new"]
        facts = {"part": "weights", "layout": "gqa", "batch": 1, "context": prompt, "cache": cache}
        by_device, limit = "graph" if self.is_compiled else False, {"max_seq_len": cache}
        sides, skipped = [ours("16 bits", model, 1, prompt, new, compiled=by_device, **limit)], []
        for form, with_head in itertools.product((WeightFormat.INT8, WeightFormat.INT4), (False, True)):
            name = f"{form} weights{' and head' if with_head else ''}"
            reason = format_refusal(form, self.device)
            if reason is None:
                changed = copy.deepcopy(model)
                quantise_weights(changed, form, with_head=with_head)
                sides.append(ours(name, changed, 1, prompt, new, compiled=by_device, **limit))
            else:
                skipped.append({"side": name, "skipped": reason})
        for row in time_sides(sides, self.repeats, 1):
            yield facts | row
        for row in skipped:
            yield facts | row

    def long(self) -> Iterator[dict[str, Any]]:
        """Batch 1 behind a long prefix, llama32_dba: a 16-bit cache and a mixed one."""
        model, context, new = self.model("llama32_dba"), self.shapes["long"], self.shapes["new_of_long"]
        sides = [
            ours("16-bit cache", model, 1, context, new, compiled=self.form, cache_kind=self.kind()),
            ours("mixed cache", model, 1, context, new, compiled=self.form, cache_kind="mixed"),
        ]
        for row in time_sides(sides, self.repeats, 1):
            yield {"part": "long", "layout": "llama32_dba", "batch": 1, "context": context} | row

    def batch(self) -> Iterator[dict[str, Any]]:
        """A batch behind prompts of some length: llama32_dba_384b and its grouped-query teacher in turns."""
        (batch, context), new = self.shapes["batch"], self.shapes["new"]
        yield from self._pair("batch", batch, context, min(new, 64))

    def caches(self) -> Iterator[dict[str, Any]]:
        """The grouped-query model at that size, whose plain attention has caches of fewer and fewer bits."""
        (batch, context), new = self.shapes["batch"], min(self.shapes["new"], 64)
        model = self.model("gqa")
        kinds = {
            kind.value: kind for kind in (self.kind(), KVCacheKind.Q8_0, KVCacheKind.Q4_0, KVCacheKind.NF4)
        }
        sides = [
            ours(name, model, batch, context, new, compiled=self.form, cache_kind=kind)
            for name, kind in kinds.items()
        ]
        for row in time_sides(sides, self.repeats, batch):
            size = models.bytes_of_step(model, batch, context + new // 2, kinds[row["side"]])
            facts = {
                "part": "caches",
                "layout": "gqa",
                "batch": batch,
                "context": context,
                "bytes_of_step": size,
            }
            yield facts | row

    def context(self, context: int) -> Iterator[dict[str, Any]]:
        """Batch 1 at one context: teacher and student in turns."""
        yield from self._pair("context", 1, context, min(self.shapes["new"], 128))

    def _pair(self, part: str, batch: int, context: int, new: int) -> Iterator[dict[str, Any]]:
        layouts = {"teacher": "gqa", "student": "llama32_dba_384b"}
        sides = [
            ours(name, self.model(layout), batch, context, new, compiled=self.form, cache_kind=self.kind())
            for name, layout in layouts.items()
        ]
        for row in time_sides(sides, self.repeats, batch):
            layout = layouts[row["side"]]
            # The middle of the steps, and one token more.
            size = models.bytes_of_step(self.model(layout), batch, context + new // 2, self.kind())
            facts = {
                "part": part,
                "layout": layout,
                "batch": batch,
                "context": context,
                "bytes_of_step": size,
            }
            yield facts | row


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="1b", choices=tuple(SHAPES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=420.0, help="no case begins later than this")
    parser.add_argument("--again", action="store_true", help="measure what the file has, too")
    parser.add_argument("--before", type=Path, help="the file to continue (default: --out)")
    parser.add_argument("--repeats", type=int, default=5)


def run(words: argparse.Namespace, record: Record) -> int | None:
    parts = words.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        raise UsageError(f"--parts {','.join(sorted(unknown))}: expected some of {','.join(PARTS)}")
    began, device = time.monotonic(), torch.device(words.device)
    kernels.load(device)
    bench = Bench(words.size, device, words.repeats, is_compiled=device.type == "cuda")
    here = machine_facts(device)
    data = {
        **record.head(here),
        "size": words.size,
        "read_bytes_per_s": read_rate(device),
        "rows": kept_rows(words.before or words.out, parts if words.again else [], words.size, here),
        "left_out": [],
    }
    known = {row.get("case") for row in data["rows"]}
    for name, measure in bench.cases(parts):
        if name in known:
            continue
        if time.monotonic() - began > words.seconds:
            data["left_out"].append(f"{name}: no time left")
            continue
        try:
            rows = [{"case": name} | row for row in measure()]  # a case is there whole or not at all
            data["rows"] += rows
            for row in rows:
                said = row.get("skipped") or f"{row['tok_s']:.1f} tok/s ({row['ran']})"
                print(f"{name}, {row['side']}: {said}", flush=True)
        except torch.OutOfMemoryError as error:
            data["left_out"].append(f"{name}: {str(error).splitlines()[0]}")
        record.write_data(data)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    record.write_data(data)
    print(f"{len(data['left_out'])} cases left; the same call again measures them", flush=True)
    if any(row["part"] == "context" for row in data["rows"]):
        draw_inference(data, words.out.with_suffix(".png"))
    return 0


def kept_rows(file: Path, parts: list[str], size: str, here: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of other parts that an earlier call wrote on this machine at this commit."""
    if not file.is_file():
        return []
    before = json.loads(file.read_text())
    is_same = before["size"] == size and is_same_machine(before.get("machine", {}), here)
    return [row for row in before["rows"] if row["part"] not in parts] if is_same else []
