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
from models import prompts_of
from record import Record
from torch import Tensor

from caramba import kernels
from caramba.config.model import ModelSpec
from caramba.infer import Generator
from caramba.launch.compose import compose
from caramba.model import Model, build_model

MUST, MUST_MODEL = 10.0, "tiny"
OPTIONS = "--models=tiny,tiny_dba --new=512 --prompt=1 --repeats=9 --compiled"
SMOKE_OPTIONS = "--models tiny --new 8 --repeats 2"


def model_of(preset: str) -> Model:
    """Return a preset's network with random weights: speed does not depend on the text."""
    tree = compose([f"model={preset}", "train=none", "benchmark=none", "verify=none"]).tree["model"]
    spec = ModelSpec.model_validate({key: tree[key] for key in ("embedder", "topology", "head")})
    return build_model(spec, seed=0).eval()


@torch.inference_mode()
def uncached(model: Model, prompt: list[list[int]], new: int, *, all_logits: bool) -> list[int]:
    """Extend a text by its likeliest tokens, each from a forward over all before it."""
    tokens: Tensor = torch.tensor(prompt)
    for _ in range(new):
        hidden = model.hidden(tokens)
        logits = model.logits(hidden if all_logits else hidden[:, -1:])
        tokens = torch.cat((tokens, logits[:, -1:].argmax(-1)), dim=1)
    return tokens[0, len(prompt[0]) :].tolist()


def measure_preset(preset: str, words: argparse.Namespace) -> list[dict[str, Any]]:
    """Return seconds of every side, and how many times as fast as those without a cache the cached ones are."""
    model, new = model_of(preset), words.new
    prompt = prompts_of(model, 1, words.prompt)
    sides: dict[str, Callable[[], list[int]]] = {}
    for name, compiled in {"cached": False, **({"cached, compiled": True} if words.compiled else {})}.items():
        generator = Generator(model, None, compiled=compiled, max_new_tokens=new, temperature=0.0)
        sides[name] = lambda generator=generator: list(generator.generate(prompt)[0].tokens)
        sides[name]()  # warms up, and compiles
    for name, all_logits in (("uncached", False), ("uncached, all logits", True)):
        sides[name] = lambda all_logits=all_logits: uncached(model, prompt, new, all_logits=all_logits)
    times: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    texts: dict[str, list[int]] = {}
    for _ in range(words.repeats):
        for name, call in sides.items():
            began, began_cpu = time.perf_counter(), time.process_time()
            texts[name] = call()
            times[name].append(time.perf_counter() - began)
            cpu[name].append(time.process_time() - began_cpu)
    rows = []
    for name, seconds in times.items():
        row: dict[str, Any] = {"model": preset, "side": name, "new_tokens": new, "prompt": words.prompt}
        row |= {"tok_s": new / statistics.median(seconds), "tok_cpu_s": new / statistics.median(cpu[name])}
        row |= {"seconds": seconds, "cpu_seconds": cpu[name]}
        row["text_is_that_of_uncached"] = texts[name] == texts["uncached"]
        for other in ("uncached", "uncached, all logits"):
            turns = [theirs / own for theirs, own in zip(cpu[other], cpu[name], strict=True)]
            row[f"over_{other}"] = statistics.median(turns)
            row[f"range_over_{other}"] = [min(turns), max(turns)]
        rows.append(row)
    return rows


def run(words: argparse.Namespace, record: Record) -> None:
    torch.set_num_threads(1)
    record.device = torch.device("cpu")
    kernels.load(record.device)
    record.start(load_before=os.getloadavg()[0], musts=[])
    for preset in words.models:
        for row in measure_preset(preset, words):
            record.add(row)
            if (row["model"], row["side"]) == (MUST_MODEL, "cached"):
                reached = row["over_uncached"]
                must = {"model": MUST_MODEL, "reached": reached, "must": MUST, "met": reached >= MUST}
                record.data["musts"].append(must)
    record.save(load_after=os.getloadavg()[0])
