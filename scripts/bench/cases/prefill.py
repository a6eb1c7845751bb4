"""Seconds of the prefill of one long prompt, by layout, and of the attention of wide keys against stock backends.

Usage on a GPU: python scripts/bench/run.py prefill [--tokens 32768] [--parts model,op] [--repeats 5] [--seconds 420]
The file is written after every case. `--size tiny --device cpu --tokens 96 --chunk 32` shows that the script works.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import models
import torch
from cases import prefill_attention
from record import Record, machine_facts
from registry import UsageError
from timing import interleave

from caramba import kernels
from caramba.config.kvcache import KVCacheKind
from caramba.infer import Generator, prefill
from caramba.model import Model
from caramba.ops import implementation
from caramba.ops.backend import without_kernels

PARTS = ("model", "op")
OP = "decoupled_attention"
PLAIN = "gqa"
"""The layout whose keys have one part."""


def prompt_of(model: Model, n_tokens: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(0)
    return torch.randint(model.spec.embedder.vocab_size, (1, n_tokens), generator=source)


def prefilling(model: Model, n_tokens: int, chunk: int, kind: KVCacheKind) -> Callable[[], float]:
    """Return what runs a prompt through a model as our Generator does, and returns the seconds."""
    given = {"max_new_tokens": 1, "temperature": 0.0, "prefill_chunk": chunk, "max_seq_len": n_tokens + 1}
    generator = Generator(model, None, **given, cache_kind=kind, compiled=False)
    prompt = prompt_of(model, n_tokens).tolist()

    def run() -> float:
        generator.generate(prompt)
        return generator.stats.prefill_s

    return run


def without(run: Callable[[], float]) -> Callable[[], float]:
    def plain_prefill() -> float:
        with without_kernels(OP):
            return run()

    return plain_prefill


@torch.inference_mode()
def difference(model: Model, n_tokens: int, chunk: int, kind: KVCacheKind) -> float:
    """Return how far the last logits with the kernel are from those without it, relative, in norms."""
    tokens = prompt_of(model, n_tokens).to(model.embedder.token.weight.device)
    ours = prefill(model, tokens, model.new_context(1, n_tokens, kind, static=True), chunk).float()
    with without_kernels(OP):
        plain = prefill(model, tokens, model.new_context(1, n_tokens, kind, static=True), chunk).float()
    return float((ours - plain).norm() / plain.norm())


def whole_models(words: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield a row a layout, those of two parts with the kernel and without: seconds and tokens per second, in turns."""
    kind = KVCacheKind.BF16 if device.type == "cuda" else KVCacheKind.FP32
    sizes = (words.tokens, words.chunk, kind)
    sides: dict[str, tuple[str, Callable[[], float]]] = {}
    facts: dict[str, dict[str, Any]] = {}
    for layout in models.LAYOUTS:
        model = models.model_of(words.size, layout, device)
        sides[layout] = layout, prefilling(model, *sizes)
        if layout != PLAIN:
            facts[layout] = {
                "attends_by": implementation(OP, device),
                "difference": difference(model, *sizes),
            }
            sides[f"{layout}, joined keys"] = layout, without(sides[layout][1])
    times = interleave({name: run for name, (_, run) in sides.items()}, repeats=words.repeats, warm=1)
    for name, (layout, _) in sides.items():
        middle = statistics.median(times[name])
        row = {"side": name, "layout": layout, "tokens": words.tokens, "chunk": words.chunk, "s": middle}
        yield row | {"all_s": times[name], "tok_s": words.tokens / middle} | facts.get(name, {})


def said(row: dict[str, Any]) -> str:
    if "refused" in row:
        return f"{row['side']} refuses: {row['refused']}"
    if "ms" in row:
        return f"{row['side']} {row['ms']:.3f} ms, {row['tflop_s']:.0f} TFLOP/s, error {row['error']:.1e}"
    more = (
        f", by {row['attends_by']}, logits differ by {row['difference']:.1e}" if "difference" in row else ""
    )
    return f"{row['side']} {row['s']:.3f} s, {row['tok_s']:,.0f} tokens/s{more}"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="1b", choices=tuple(models.SIZES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=420.0, help="no case begins later than this")


def run(words: argparse.Namespace, record: Record) -> int | None:
    parts = words.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        raise UsageError(f"--parts {','.join(sorted(unknown))}: expected some of {','.join(PARTS)}")
    if not 0 < words.chunk < words.tokens:
        raise UsageError(f"--chunk {words.chunk}: expected less than --tokens {words.tokens}")
    began, device = time.monotonic(), torch.device(words.device)
    kernels.load(device)
    data: dict[str, Any] = {
        **record.head(machine_facts(device)),
        "size": words.size,
        "models": [],
        "ops": [],
        "left_out": [],
    }
    cases: list[tuple[str, str, Callable[[], list[dict[str, Any]]]]] = []
    if "op" in parts:
        for shape in prefill_attention.shapes(words.size, words.tokens, words.chunk):
            run = lambda shape=shape: prefill_attention.measure(shape, device, 4 * words.repeats)  # noqa: E731
            cases.append((f"attention, {shape.name}", "ops", run))
    if "model" in parts:
        cases.append(
            (f"prompt of {words.tokens} tokens", "models", lambda: list(whole_models(words, device)))
        )
    for name, kind, run in cases:
        if time.monotonic() - began > words.seconds:
            data["left_out"].append(f"{name}: no time left")
            continue
        try:
            rows = run()
        except torch.OutOfMemoryError as error:
            data["left_out"].append(f"{name}: {str(error).splitlines()[0]}")
            rows = []
        data[kind] += rows
        for row in rows:
            print(name, said(row), sep=": ", flush=True)
        record.write_data(data)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    record.write_data(data)
    return 0
