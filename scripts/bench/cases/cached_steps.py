"""Greedy decoding of a tiny preset with its cache, against the same without one. Writes JSON.

Usage: python scripts/bench/run.py cached_steps [--models tiny,tiny_dba] [--new 512] [--repeats 9] [--compiled]

Without a cache every token costs a forward over all before it, with the logits of the last token alone or, as plain
loops have it, of all. The must applies to the former, the faster of the two. Sides take turns in one thread, and a
ratio is that of the CPU seconds of two runs of one turn, which other work on its core lengthens less than the
wall's: printed are the median over the turns and the range.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from record import Record, machine_facts
from torch import Tensor

from caramba import kernels
from caramba.config.model import ModelSpec
from caramba.infer import Generator
from caramba.launch.compose import compose
from caramba.model import Model, build_model

MUST, MUST_MODEL = 10.0, "tiny"


def model_of(preset: str, device: torch.device) -> Model:
    """Return a preset's network with random weights: speed does not depend on the text."""
    tree = compose([f"model={preset}", "train=none", "benchmark=none", "verify=none"]).tree["model"]
    spec = ModelSpec.model_validate({key: tree[key] for key in ("embedder", "topology", "head")})
    return build_model(spec, seed=0, device=device).eval()


@torch.inference_mode()
def uncached(model: Model, tokens: Tensor, new: int, *, all_logits: bool) -> Tensor:
    """Extend a text by its likeliest tokens, each from a forward over all before it."""
    for _ in range(new):
        hidden = model.hidden(tokens)
        logits = model.logits(hidden if all_logits else hidden[:, -1:])
        tokens = torch.cat((tokens, logits[:, -1:].argmax(-1)), dim=1)
    return tokens


def measure_preset(preset: str, words: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Return seconds of every side, and how many times as fast as those without a cache the cached ones are."""
    model, new, prompt = model_of(preset, device), words.new, words.prompt
    source = torch.Generator().manual_seed(0)
    given = torch.randint(model.spec.embedder.vocab_size, (1, prompt), generator=source)
    options: dict[str, Any] = {"max_new_tokens": new, "temperature": 0.0}
    cached = {"cached": Generator(model, None, compiled=False, **options)}
    if words.compiled:
        cached["cached, compiled"] = Generator(model, None, compiled=True, **options)
    sides: dict[str, Callable[[], list[int]]] = {
        name: lambda generator=generator: list(generator.generate(given.tolist())[0].tokens)
        for name, generator in cached.items()
    }
    for name, all_logits in (("uncached", False), ("uncached, all logits", True)):
        sides[name] = lambda all_logits=all_logits: uncached(
            model, given.to(device), new, all_logits=all_logits
        )[0, prompt:].tolist()
    for name in cached:  # warms up, and compiles
        sides[name]()
    times: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    texts: dict[str, list[int]] = {}
    for _ in range(words.repeats):
        for name, run in sides.items():
            began, began_cpu = time.perf_counter(), time.process_time()
            texts[name] = run()
            times[name].append(time.perf_counter() - began)
            cpu[name].append(time.process_time() - began_cpu)
    rows = []
    for name, seconds in times.items():
        row = {"model": preset, "side": name, "new_tokens": new, "prompt": prompt}
        row |= {
            "tok_s": new / statistics.median(seconds),
            "tok_cpu_s": new / statistics.median(cpu[name]),
            "seconds": seconds,
            "cpu_seconds": cpu[name],
            "text_is_that_of_uncached": texts[name] == texts["uncached"],
        }
        for other in ("uncached", "uncached, all logits"):
            turns = [theirs / own for theirs, own in zip(cpu[other], cpu[name], strict=True)]
            row[f"over_{other}"] = statistics.median(turns)
            row[f"range_over_{other}"] = [min(turns), max(turns)]
        rows.append(row)
    return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default="tiny,tiny_dba")
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--compiled", action="store_true", help="compiled steps too")


def run(words: argparse.Namespace, record: Record) -> int | None:
    load = os.getloadavg()[0]
    torch.set_num_threads(1)
    device = torch.device("cpu")
    kernels.load(device)
    rows = []
    for preset in words.models.split(","):
        for row in measure_preset(preset, words, device):
            rows.append(row)
            low, high = row["range_over_uncached"]
            print(
                f"{preset}, {row['side']}: {row['tok_s']:.0f} tokens/s, {row['tok_cpu_s']:.0f} a CPU second, "
                f"{row['over_uncached']:.1f}x uncached ({low:.1f} to {high:.1f}), "
                f"{row['over_uncached, all logits']:.1f}x uncached with all logits, "
                f"same text: {row['text_is_that_of_uncached']}",
                flush=True,
            )
    machine = machine_facts(device)
    data = {
        **record.head(machine),
    }
    musts = [
        {
            "model": row["model"],
            "reached": row["over_uncached"],
            "must": MUST,
            "met": row["over_uncached"] >= MUST,
        }
        for row in rows
        if row["model"] == MUST_MODEL and row["side"] == "cached"
    ]
    loads = {"load_before": load, "load_after": os.getloadavg()[0]}
    record.write_data(data | loads | {"rows": rows, "musts": musts})
    return 0
