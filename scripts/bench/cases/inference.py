"""Tokens per second of whole decodes: short prefixes against a hand-captured static loop, long ones, batches, and
speed against context under the memory bound. Writes JSON after every row, and a plot.

Usage on a GPU: python scripts/bench/run.py inference [--parts short,long,batch,context] [--seconds 420] [--out FILE]
The same call again measures the cases that are not in the file yet; `--before FILE` continues another file. What was
measured on another device, at another commit or with another torch is measured again. `--size tiny --device cpu` shows
that the script works.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import models
import numpy as np
import torch
from models import bytes_of_step, cache_kind, prompts_of
from plots import draw_inference
from record import Record, Row
from registry import check_names
from static_decode import StaticDecoder
from timing import interleave, read_rate, wall_seconds

from caramba import kernels
from caramba.config.benchmark import WeightFormat
from caramba.config.kvcache import KVCacheKind
from caramba.infer import Generator, prefill
from caramba.lower.quantize import format_refusal, quantise_weights
from caramba.model import Model
from caramba.ops.backend import without_kernels

# (cache, prompt) of short prefixes, tokens of the long one, (batch, tokens) of the batch, contexts of the curve, and
# new tokens, of the long prefix and of the others.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"short": ((64, 16), (128, 16), (128, 112)), "long": 96, "batch": (2, 64), "contexts": (32, 64)}
    | {"new": 8, "new_of_long": 8},
    "1b": {"short": ((512, 128), (4096, 128), (4096, 3584)), "long": 32768, "batch": (32, 8192)}
    | {"contexts": (512, 2048, 8192, 32768, 131072), "new": 256, "new_of_long": 512},
}
PARTS = ("short", "weights", "long", "batch", "caches", "context")
CHUNK = 2048
OPTIONS = """--size=1b|tiny --parts=short,weights,long,batch,caches,context --seconds=420.0 --repeats=5 --before="""
NEEDS = ("torchao",)
SMOKE_OPTIONS = "--size tiny --device cpu --parts short,context --repeats 1"


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
    prompts = prompts_of(model, batch, prompt)

    def run() -> tuple[float, int]:
        generator.generate(prompts)
        return generator.stats.decode_s, generator.stats.steps

    def facts() -> dict[str, Any]:
        stats = generator.stats
        known = {"ran": stats.decode, "why_not": stats.not_compiled, "cache_kind": stats.cache_kind}
        known |= {"prefill_s": stats.prefill_s, "cache_bytes": stats.cache_bytes}
        return known | {"captures_when_timed": stats.captures}

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
    device = model.embedder.token.weight.device
    tokens = torch.tensor(prompts_of(model, 1, prompt), device=device)
    ctx = model.new_context(1, prompt + 1, cache_kind(device), static=True)
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
        return wall_seconds(lambda: decoder.run(new - 1), device), new - 1

    ran = ("compiled " if decoder.is_compiled else "") + ("graph" if device.type == "cuda" else "eager")
    return Side(name, run, lambda: {"ran": ran}), {"peer_error": error}


def time_sides(sides: list[Side], repeats: int, batch: int, **about: Any) -> Iterator[Row]:
    """Yield a row a side: median, middle 60% and all of its tokens per second. Sides take turns, the first untimed."""

    def speed(side: Side) -> float:
        seconds, steps = side.run()
        return batch * steps / seconds

    calls = {side.name: lambda side=side: speed(side) for side in sides}
    speeds = interleave(calls, repeats=repeats, warm=1)
    for side in sides:
        found = speeds[side.name]
        p20, p80 = (float(value) for value in np.percentile(found, [20, 80]))
        row = {"side": side.name, "tok_s": statistics.median(found), "p20": p20, "p80": p80, "all": found}
        yield about | {"batch": batch} | row | side.facts()


class Bench:
    """The cases, each a generator of rows."""

    def __init__(self, size: str, device: torch.device, repeats: int) -> None:
        self.size, self.device, self.repeats = size, device, repeats
        self.is_compiled = device.type == "cuda"
        self.shapes, self.kind = SHAPES[size], cache_kind(device)
        self.form: bool | str = True if self.is_compiled else "graph"
        self._models: dict[str, Model] = {}
        self._peers: dict[tuple[int, bool], StaticDecoder] = {}

    def model(self, layout: str) -> Model:
        """Return a model, the last two of which are kept."""
        found = self._models.pop(layout, None)
        while found is None and len(self._models) > 1:
            self._models.pop(next(iter(self._models)))
        self._models[layout] = found or models.model_of(self.size, layout, self.device)
        return self._models[layout]

    def cases(self, parts: list[str]) -> Iterator[tuple[str, Callable[[], Iterator[Row]]]]:
        """Yield the name of each case and what measures it."""
        shapes = self.shapes
        named = {
            "short": [
                (f"short, {prompt} tokens in {cache}", lambda at=(cache, prompt): self.short(*at))
                for cache, prompt in shapes["short"]
            ],
            "weights": [("weights of fewer bits", self.fewer_bits)],
            "long": [(f"long, {shapes['long']} tokens", self.long)],
            "batch": [("batch, {} x {}".format(*shapes["batch"]), self.batch)],
            "caches": [("caches, {} x {}".format(*shapes["batch"]), self.caches)],
            "context": [
                (f"context, {context} tokens", lambda context=context: self.context(context))
                for context in shapes["contexts"]
            ],
        }
        return itertools.chain.from_iterable(named[part] for part in PARTS if part in parts)

    def peer(self, cache: int, prompt: int, *, has_reductions: bool = False) -> tuple[Side, dict[str, Any]]:
        """Return the static loop on a prompt; it is compiled once for each cache."""
        model, key = self.model("gqa"), (cache, has_reductions)
        if key not in self._peers:
            self._peers.clear()
            form = {"is_compiled": self.is_compiled, "has_reductions": has_reductions}
            self._peers[key] = StaticDecoder(model, 1, cache, **form)
        name = "static loop, reductions" if has_reductions else "static loop"
        return peer(model, self._peers[key], prompt, self.shapes["new"], name)

    def short(self, cache: int, prompt: int) -> Iterator[Row]:
        """Batch 1, the grouped-query model: our steps and the static loop, in the first case by other products too.

        The static loop reads its whole cache. Ours may hold as many tokens, and takes a cache of the text's bucket.
        """

        def side(name: str, compiled: Any) -> Side:
            new = self.shapes["new"]
            return ours(name, self.model("gqa"), 1, prompt, new, compiled=compiled, max_seq_len=cache)

        has_more = self.is_compiled and (cache, prompt) == self.shapes["short"][0]
        reductions = [self.peer(cache, prompt, has_reductions=True)[0]] if has_more else []
        static, error = self.peer(cache, prompt)
        sides = [static, side("captured", "graph"), *reductions]
        sides += [by_library(side("captured", "graph"))] if has_more else []
        sides += [side("compiled and captured", True)] if self.is_compiled else []
        about = {"part": "short", "layout": "gqa", "batch": 1, "context": prompt, "cache": cache, **error}
        yield from time_sides(sides, self.repeats, **about)

    def fewer_bits(self) -> Iterator[Row]:
        """Weights of fewer bits against those of 16, behind the first of the short prefixes, one sequence.

        Steps are captured.
        """
        model, (cache, prompt), new = self.model("gqa"), self.shapes["short"][0], self.shapes["new"]
        about = {"part": "weights", "layout": "gqa", "batch": 1, "context": prompt, "cache": cache}
        keys: dict[str, Any] = {"compiled": "graph" if self.is_compiled else False, "max_seq_len": cache}
        sides, skipped = [ours("16 bits", model, 1, prompt, new, **keys)], []
        for form, with_head in itertools.product((WeightFormat.INT8, WeightFormat.INT4), (False, True)):
            name = f"{form} weights{' and head' if with_head else ''}"
            if reason := format_refusal(form, self.device):
                skipped.append(about | {"side": name, "skipped": reason})
                continue
            changed = copy.deepcopy(model)
            quantise_weights(changed, form, with_head=with_head)
            sides.append(ours(name, changed, 1, prompt, new, **keys))
        yield from time_sides(sides, self.repeats, **about)
        yield from skipped

    def long(self) -> Iterator[Row]:
        """Batch 1 behind a long prefix, llama32_dba: a 16-bit cache and a mixed one."""
        about = {"part": "long", "layout": "llama32_dba", "batch": 1, "context": self.shapes["long"]}
        yield from self._kinds(about, {"16-bit cache": self.kind, "mixed cache": "mixed"}, "new_of_long")

    def caches(self) -> Iterator[Row]:
        """The grouped-query model at that size, whose plain attention has caches of fewer and fewer bits."""
        batch, context = self.shapes["batch"]
        kinds = {kind.value: kind for kind in (self.kind, KVCacheKind.Q8_0, KVCacheKind.Q4_0, KVCacheKind.NF4)}
        about = {"part": "caches", "layout": "gqa", "batch": batch, "context": context}
        for row in self._kinds(about, kinds, "new", most=64):
            steps = min(self.shapes["new"], 64)
            size = bytes_of_step(self.model("gqa"), batch, context + steps // 2, kinds[row["side"]])
            yield row | {"bytes_of_step": size}

    def _kinds(self, about: Row, kinds: dict[str, Any], new: str, most: int = 1024) -> Iterator[Row]:
        """Decode one model with several caches, in turns."""
        at = (about["batch"], about["context"], min(self.shapes[new], most))
        model = self.model(about["layout"])
        sides = [ours(name, model, *at, compiled=self.form, cache_kind=kind) for name, kind in kinds.items()]
        return time_sides(sides, self.repeats, **about)

    def batch(self) -> Iterator[Row]:
        """A batch behind prompts of some length: llama32_dba_384b and its grouped-query teacher in turns."""
        yield from self._pair("batch", *self.shapes["batch"], min(self.shapes["new"], 64))

    def context(self, context: int) -> Iterator[Row]:
        """Batch 1 at one context: teacher and student in turns."""
        yield from self._pair("context", 1, context, min(self.shapes["new"], 128))

    def _pair(self, part: str, batch: int, context: int, new: int) -> Iterator[Row]:
        layouts = {"teacher": "gqa", "student": "llama32_dba_384b"}
        keys = {"compiled": self.form, "cache_kind": self.kind}
        sides = [ours(name, self.model(key), batch, context, new, **keys) for name, key in layouts.items()]
        for row in time_sides(sides, self.repeats, part=part, batch=batch, context=context):
            layout = layouts[row["side"]]
            # The middle of the steps, and one token more.
            size = bytes_of_step(self.model(layout), batch, context + new // 2, self.kind)
            yield row | {"layout": layout, "bytes_of_step": size}


def run(words: argparse.Namespace, record: Record) -> None:
    check_names("--parts", words.parts, PARTS)
    kernels.load(record.device)
    bench = Bench(words.size, record.device, words.repeats)
    record.start(resume=("rows",), before=words.before, size=words.size)
    record.save(read_bytes_per_s=read_rate(record.device))
    record.measure(bench.cases(words.parts), words.seconds)
    record.write_plot(draw_inference(record.data))
