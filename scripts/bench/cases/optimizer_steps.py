"""One optimiser step of every optimiser, clipping and kind of weights at the shapes of a model: time and memory.

Usage on a GPU: python scripts/bench/run.py optimizer_steps [--size 1b] [--out docs/benchmarks/optimizer_steps.json]
`--adamw` measures AdamW's step alone, for 15 s: our kernel against torch's fused one, over weights of every
kind, rounded to nearest, from masters, which may be in the moments, or at random, in device time, bytes a second and as
a share of a copy of memory, with the peak of memory; `--sweep` also sizes of its blocks. The rest of what --out holds
is kept.
`--size tiny --repeats 2` shows on a CPU that the script works.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from cases.training import Masters
from record import Record, machine_facts
from timing import host_seconds, interleave, wall_seconds
from torch import nn

from caramba import kernels
from caramba.config.train import PhaseConfig
from caramba.optim import AdaGC, AdamW, MasterWeights, build_optimizer, clip_gradients, clip_values
from caramba.runtime import release_memory

# d_model, layers, key/value width, d_ff, vocabulary: the second is Llama 3.2 1B's, embedding tied to the head.
SIZES = {"tiny": (64, 2, 32, 128, 128), "1b": (2048, 16, 512, 8192, 128256)}
BFLOAT16 = {"dtype": "bfloat16", "use_amp": False}
AT_RANDOM = "bfloat16 weights, rounded at random"
IN_MOMENTS = "bfloat16 weights, masters in the moments"
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"optimizer": "sgd"},
    "lion": {"optimizer": "lion"},
    "adafactor": {"optimizer": "adafactor"},
    "muon": {"optimizer": "muon"},
    "adamw, bfloat16 weights": BFLOAT16,
    "adamw, bfloat16 weights, masters": {**BFLOAT16, "master_weights": True},
    "adamw, bfloat16 weights, masters in the moments": {**BFLOAT16, "master_weights": "in_moments"},
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


def time_calls(call: Callable[[], Any], device: torch.device, repeats: int) -> list[float]:
    """Return milliseconds of each call, host and device, after three to warm up."""
    taken = interleave({"": lambda: wall_seconds(call, device)}, repeats=repeats, warm=3)[""]
    return [1e3 * seconds for seconds in taken]


def device_ms(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Return the median milliseconds of a call on the device, queued behind others so that it waits for no host."""
    if device.type != "cuda":
        return statistics.median(time_calls(call, device, repeats))
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda._sleep(int(4e7))  # some 20 ms, in which the host gets ahead
    for event in events[:-1]:
        event.record()
        call()
    events[-1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def host_ms(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Return the median milliseconds that the host takes for a call, the device idle before it."""
    return 1e3 * statistics.median(host_seconds(call, device, 1, 1) for _ in range(repeats))


def adamw_rows(size: str, device: torch.device, repeats: int, sweep: bool) -> list[dict[str, Any]]:
    """Measure AdamW's step, ours and torch's, and a copy of as much memory as the largest reads and writes."""
    rows: list[dict[str, Any]] = []

    def add(name: str, call: Callable[[], Any], moved: int) -> None:
        call()  # makes states, of which none is needed for less than a step
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        ms = device_ms(call, device, repeats)
        found = {"name": name, "device_ms": ms, "host_ms": host_ms(call, device, repeats), "bytes": moved}
        found["bytes_per_s"] = moved / ms * 1e3
        found["share_of_copy"] = found["bytes_per_s"] / (rows[0] if rows else found)["bytes_per_s"]
        found["peak_bytes"] = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        rows.append(found)
        print(
            f"{name}: {ms:.2f} ms, {moved / ms / 1e9:.2f} TB/s, {found['share_of_copy']:.0%} of a copy, host "
            f"{found['host_ms']:.2f} ms"
            + ("" if device.type != "cuda" else f", peak {found['peak_bytes'] / 1e9:.1f} GB"),
            flush=True,
        )

    for kind, dtype, has_masters in (
        ("float32 weights", torch.float32, False),
        ("bfloat16 weights", torch.bfloat16, False),
        ("bfloat16 weights, masters", torch.bfloat16, True),
        (AT_RANDOM, torch.bfloat16, False),
        (IN_MOMENTS, torch.bfloat16, False),
    ):
        weights = [weight for _, weight in parameters_of(size, device, dtype)]
        named = [(f"topology.{place}", weight) for place, weight in enumerate(weights)]
        elements = sum(weight.numel() for weight in weights)
        # A step reads weight, moments and gradient, and writes all but the gradient; with masters the weight too.
        moved = elements * (
            28 if has_masters else 22 if kind in (AT_RANDOM, IN_MOMENTS) else 7 * dtype.itemsize
        )
        if not rows:
            source, target = (torch.empty(moved // 2, dtype=torch.uint8, device=device) for _ in range(2))
            add("copy", lambda a=target, b=source: a.copy_(b), moved // 2 * 2)
            del source, target
        if has_masters or kind in (AT_RANDOM, IN_MOMENTS):
            wide = MasterWeights(
                named,
                lambda copies: AdamW([p for _, p in copies], lr=1e-4),
                keeps=has_masters,
                in_moments=kind == IN_MOMENTS,
            )
            add(f"{kind}, ours", wide.step, moved)
            del wide
        if kind in (AT_RANDOM, IN_MOMENTS):  # which torch has nothing for
            del weights, named
            release_memory()
            continue
        if has_masters:
            theirs: Any = Masters(weights, 1e-4)
        else:
            ours = AdamW(weights, lr=1e-4)
            add(f"{kind}, ours", ours.step, moved)
            ours.state.clear()
            if sweep:
                add_sweep(add, kind, ours, moved)
                ours.state.clear()
            del ours  # which would keep these weights and gradients through the kinds after
            theirs = torch.optim.AdamW(weights, lr=1e-4, fused=True)
        add(f"{kind}, torch", theirs.step, moved)
        del theirs
        if not has_masters:
            gradients = [weight.grad for weight in weights]
            read = elements * dtype.itemsize
            add(f"{kind}, norms of gradients, ours", lambda own=weights: clip_gradients([own], None), read)
            norm_of = functools.partial(torch._foreach_norm, gradients, 2, dtype=torch.float32)
            add(f"{kind}, norms of gradients, torch", norm_of, read)
            del gradients, norm_of
        del weights, named
        release_memory()
    return rows


def add_sweep(add: Callable[..., None], kind: str, ours: AdamW, moved: int) -> None:
    """Measure our step with other sizes of blocks and numbers of warps."""
    lists, kernel = (
        importlib.import_module(f"caramba.kernels.triton.{name}") for name in ("multi_tensor", "adamw")
    )
    chosen = kernel.BLOCK, kernel.WARPS
    for block, warps in ((1024, 4), (1024, 8), (2048, 4), (4096, 4), (4096, 8), (4096, 16)):
        lists.forget()
        kernel.BLOCK = block
        kernel.WARPS = warps
        add(f"{kind}, blocks of {block} by {warps} warps", ours.step, moved)
    lists.forget()
    kernel.BLOCK, kernel.WARPS = chosen


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--adamw", action="store_true", help="AdamW's step alone")
    parser.add_argument("--sweep", action="store_true", help="with --adamw: other sizes of its blocks too")
    parser.add_argument("--size", default="1b", choices=tuple(SIZES))
    parser.add_argument("--repeats", type=int, default=20)


def run(words: argparse.Namespace, record: Record) -> int | None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernels.load(device)
    if words.adamw:
        found = adamw_rows(words.size, device, words.repeats, words.sweep)
        known = record.read()
        about = {
            **record.head(machine_facts(device)),
        }
        record.write_data(known | about | {"adamw": {"size": words.size, "rows": found}})
        return 0
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
        rows.append(row(name, time_calls(optimizer.step, device, words.repeats), device))
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
        rows.append(row(name, time_calls(call, device, words.repeats), device))
    parameters = sum(weight.numel() for weight in weights)
    facts = {
        **record.head(machine_facts(device)),
        "size": words.size,
    }
    known = record.read()
    record.write_data(known | {**facts, "parameters": parameters, "rows": rows})
    return 0


def row(name: str, ms: list[float], device: torch.device) -> dict[str, Any]:
    """Return a row of the table, printed as well."""
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    median = statistics.median(ms)
    print(f"{name}: {median:.2f} ms" + ("" if peak is None else f", peak {peak / 1e9:.1f} GB"))
    return {"name": name, "ms": median, "all": ms, "peak_bytes": peak}
