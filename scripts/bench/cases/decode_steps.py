"""Whole decode steps driven by the host, captured in a CUDA graph, and compiled too: tokens per second. Writes JSON.

Usage on a GPU: python scripts/bench/run.py decode_steps [--batch 1] [--out docs/benchmarks/decode_steps.json]
`--size tiny --forms false,graph` shows on a CPU that the script works.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from record import Record, machine_facts
from timing import interleave

from caramba import kernels
from caramba.config.model import ModelSpec
from caramba.infer import Generator
from caramba.model import Model, build_model

FORMS: dict[str, Any] = {"false": False, "graph": "graph", "true": True}
# d_model, layers, heads, key/value heads, d_ff, vocabulary: the second is Llama 3.2 1B's.
SIZES = {"tiny": (64, 2, 4, 2, 128, 128), "1b": (2048, 16, 32, 8, 8192, 128256)}
LAYOUTS: dict[str, dict[str, Any]] = {
    "gqa": {"mode": "gqa"},
    "latent": {"mode": "decoupled", "layout": "latent", "sem_dim": 128, "geo_dim": 64},
}


def model_of(size: str, layout: str, device: torch.device) -> Model:
    """Return a model of random weights, bfloat16 on a GPU: speed does not depend on the text."""
    d_model, n_layers, n_heads, n_kv_heads, d_ff, vocab = SIZES[size]
    norm = {"type": "RMSNormLayer", "d_model": d_model}
    heads = {"n_heads": n_heads, "n_kv_heads": n_kv_heads}
    attention = {"type": "AttentionLayer", "d_model": d_model, **heads, **LAYOUTS[layout]}
    mlp = {"type": "SwiGLULayer", "d_model": d_model, "d_ff": d_ff}
    layers = [{"type": "ResidualTopology", "layers": [norm, layer]} for layer in (attention, mlp)]
    block = {"type": "SequentialTopology", "layers": layers}
    nested = {"type": "NestedTopology", "layers": [block], "repeat": n_layers}
    spec = ModelSpec.model_validate(
        {
            "embedder": {"vocab_size": vocab, "d_model": d_model},
            "topology": {"type": "StackedTopology", "layers": [nested, norm]},
            "head": {"tied": True},
        }
    )
    model = build_model(spec, seed=0).eval()
    return model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)


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
