"""Whole decode steps driven by the host, captured in a CUDA graph, and compiled too: tokens per second. Writes JSON.

Usage on a GPU: python scripts/bench/run.py decode_steps [--batch 1] [--out docs/benchmarks/decode_steps.json]
`--size tiny --forms false,graph` shows on a CPU that the script works.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from models import model_of, prompts_of
from record import Record
from timing import interleave

from caramba import kernels
from caramba.infer import Generator

FORMS: dict[str, Any] = {"false": False, "graph": "graph", "true": True}
OPTIONS = "--size=1b|tiny --forms=false,graph,true --batch=1 --prompt=512 --new=256 --repeats=5"
SMOKE_OPTIONS = "--size tiny --forms false --new 4 --prompt 8 --repeats 1"


def run(words: argparse.Namespace, record: Record) -> None:
    kernels.load(record.device)
    record.start(size=words.size, batch=words.batch, prompt=words.prompt, new=words.new)
    for layout in ("gqa", "latent"):
        model = model_of(words.size, layout, record.device)
        prompts = prompts_of(model, words.batch, words.prompt)
        keys: dict[str, Any] = {"max_new_tokens": words.new, "temperature": 0.0, "read_every": 64}
        generators = {name: Generator(model, None, compiled=FORMS[name], **keys) for name in words.forms}

        def steps_per_second(name: str) -> float:
            """Of the decode alone, the capture of its graph included."""
            generator = generators[name]  # noqa: B023 - called in this turn of the loop
            generator.generate(prompts)  # noqa: B023
            return generator.stats.steps / generator.stats.decode_s

        sides = {name: lambda name=name: steps_per_second(name) for name in generators}
        for name, speeds in interleave(sides, repeats=words.repeats, warm=1).items():
            stats = generators[name].stats
            row = {"layout": layout, "compiled": name, "ran": stats.decode, "why_not": stats.not_compiled}
            record.add(row | {"steps_per_s": statistics.median(speeds), "all": speeds})
