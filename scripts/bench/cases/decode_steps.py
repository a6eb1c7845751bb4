"""Whole decode steps driven by the host, captured in a CUDA graph, and compiled too: tokens per second. Writes JSON.

Usage on a GPU: python scripts/bench/run.py decode_steps [--batch 1] [--out docs/benchmarks/decode_steps.json]
`--size tiny --forms false,graph` shows on a CPU that the script works.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from models import SIZES, model_of
from record import Record, machine_facts
from timing import interleave

from caramba import kernels
from caramba.infer import Generator

FORMS: dict[str, Any] = {"false": False, "graph": "graph", "true": True}
LAYOUTS = ("gqa", "latent")


def time_steps(generator: Generator, prompts: list[list[int]]) -> float:
    """Return steps per second of the decode alone, the capture of its graph included."""
    generator.generate(prompts)
    return generator.stats.steps / generator.stats.decode_s


SMOKE_OPTIONS = ("--size", "tiny", "--forms", "false", "--new", "4", "--prompt", "8", "--repeats", "1")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="1b", choices=tuple(SIZES))
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)


def run(words: argparse.Namespace, record: Record) -> int | None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernels.load(device)
    rows: list[dict[str, Any]] = []
    for layout in LAYOUTS:
        model = model_of(words.size, layout, device)
        vocab = SIZES[words.size][-1]
        prompts = torch.randint(vocab, (words.batch, words.prompt)).tolist()
        options: dict[str, Any] = {"max_new_tokens": words.new, "temperature": 0.0, "read_every": 64}
        ways = {
            name: Generator(model, None, compiled=FORMS[name], **options) for name in words.forms.split(",")
        }
        sides = {
            name: lambda generator=generator, prompts=prompts: time_steps(generator, prompts)
            for name, generator in ways.items()
        }
        speeds = interleave(sides, repeats=words.repeats, warm=1)
        for name, generator in ways.items():
            stats = generator.stats
            row = {"layout": layout, "compiled": name, "ran": stats.decode, "why_not": stats.not_compiled}
            row |= {"steps_per_s": statistics.median(speeds[name]), "all": speeds[name]}
            rows.append(row)
            print(f"{layout} compiled={name} ({stats.decode}): {row['steps_per_s']:.1f} steps/s")
    shape = {"size": words.size, "batch": words.batch, "prompt": words.prompt, "new": words.new}
    record.write(machine_facts(device), **shape, rows=rows)
    return 0
