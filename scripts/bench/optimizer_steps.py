"""One optimiser step of every optimiser, clipping and kind of weights at the shapes of a model: time and memory.

Usage on a GPU: python scripts/bench/optimizer_steps.py [--size 1b] [--out docs/benchmarks/optimizer_steps.json]
`--size tiny --repeats 2` shows on a CPU that the script works.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from caramba import kernels
from caramba.config.train import PhaseConfig
from caramba.optim import AdaGC, build_optimizer, clip_gradients, clip_values
from caramba.runs.files import write_json
from caramba.runtime import synchronize

# d_model, layers, key/value width, d_ff, vocabulary: the second is Llama 3.2 1B's, embedding tied to the head.
SIZES = {"tiny": (64, 2, 32, 128, 128), "1b": (2048, 16, 512, 8192, 128256)}
BFLOAT16 = {"dtype": "bfloat16", "use_amp": False}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"optimizer": "sgd"},
    "lion": {"optimizer": "lion"},
    "adafactor": {"optimizer": "adafactor"},
    "muon": {"optimizer": "muon"},
    "adamw, bfloat16 weights": BFLOAT16,
    "adamw, bfloat16 weights, masters": {**BFLOAT16, "master_weights": True},
    "adamw, bfloat16 weights, rounded at random": {**BFLOAT16, "stochastic_rounding": True},
    "adamw, on the host": {"optimizer_offload": True},
}


def parameters_of(size: str, device: torch.device, dtype: torch.dtype) -> list[tuple[str, nn.Parameter]]:
    """Return the named parameters of a decoder, random, with gradients."""
    d_model, n_layers, kv, d_ff, vocab = SIZES[size]
    attention = {"q": (d_model, d_model), "k": (kv, d_model), "v": (kv, d_model), "out": (d_model, d_model)}
    mlp = {"gate": (d_ff, d_model), "up": (d_ff, d_model), "down": (d_model, d_ff)}
    norms = {"norm_1": (d_model,), "norm_2": (d_model,)}
    shapes = {
        f"topology.{layer}.{name}": shape
        for layer in range(n_layers)
        for name, shape in (attention | mlp | norms).items()
    }
    named = [("embedder.token.weight", (vocab, d_model)), *shapes.items()]
    made = []
    for name, shape in named:
        weight = nn.Parameter(torch.randn(shape, device=device).mul_(0.02).to(dtype))
        weight.grad = torch.randn(shape, device=device).mul_(1e-3).to(dtype)
        made.append((name, weight))
    return made


def timed(call: Callable[[], Any], device: torch.device, repeats: int) -> list[float]:
    """Return milliseconds of each call, host and device, after three to warm up."""
    found = []
    for turn in range(3 + repeats):
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        if turn >= 3:
            found.append(1e3 * (time.perf_counter() - began))
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="1b", choices=tuple(SIZES))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/optimizer_steps.json"))
    words = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernels.load(device)
    rows: list[dict[str, Any]] = []
    for name, settings in OPTIMIZERS.items():
        values = {"phase": "pretrain", "steps": 1, "lr": 1e-4, "weight_decay": 0.1, **settings}
        phase = PhaseConfig.model_validate(values)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        named = parameters_of(words.size, device, torch.float32)
        optimizer = build_optimizer(named, phase)
        if phase.has_16_bit_weights:
            for _, weight in named:
                grad, weight.grad = weight.grad, None
                weight.data = weight.data.bfloat16()
                weight.grad = None if grad is None else grad.bfloat16()
        rows.append(row(name, timed(optimizer.step, device, words.repeats), device))
        del optimizer, named
    named = parameters_of(words.size, device, torch.float32)
    weights = [weight for _, weight in named]
    ways: dict[str, Callable[[], Any]] = {
        "clipping by norm": lambda: clip_gradients([weights], 1.0),
        "clipping by value": lambda: clip_values([weights], 1.0),
        "adagc": AdaGC(weights, warmup_steps=1),
    }
    for name, way in ways.items():
        call = (lambda clip: lambda: clip([weights]))(way) if name == "adagc" else way
        rows.append(row(name, timed(call, device, words.repeats), device))
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    device_name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor()
    parameters = sum(weight.numel() for weight in weights)
    facts = {"device": device_name, "torch": torch.__version__, "commit": commit, "size": words.size}
    write_json(words.out, {**facts, "parameters": parameters, "rows": rows})
    return 0


def row(name: str, ms: list[float], device: torch.device) -> dict[str, Any]:
    """Return a row of the table, printed as well."""
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    median = statistics.median(ms)
    print(f"{name}: {median:.2f} ms" + ("" if peak is None else f", peak {peak / 1e9:.1f} GB"))
    return {"name": name, "ms": median, "all": ms, "peak_bytes": peak}


if __name__ == "__main__":
    raise SystemExit(main())
