"""One optimiser step of every optimiser, clipping and kind of weights at the shapes of a model: time and memory.

Usage on a GPU: python scripts/bench/run.py optimizer_steps [--size 1b] [--out docs/benchmarks/optimizer_steps.json]
`--adamw` measures AdamW's step alone, for 15 s: our kernel against torch's fused one, over weights of every
kind, rounded to nearest, from masters, which may be in the moments, or at random, in device time, bytes a second and as
a share of a copy of memory, with the peak of memory. The rest of what --out holds is kept.
`--size tiny --repeats 2` shows on a CPU that the script works.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from cases.training import Masters
from models import model_of
from record import Record, Row
from timing import host_seconds, interleave, wall_seconds
from torch import nn

from caramba import kernels
from caramba.config.train import PhaseConfig
from caramba.optim import AdaGC, AdamW, MasterWeights, build_optimizer, clip_gradients, clip_values
from caramba.runtime import release_memory

OPTIONS = "--adamw --size=1b|tiny --repeats=20"
SMOKE_OPTIONS = "--size tiny --repeats 1"
BFLOAT16 = {"dtype": "bfloat16", "use_amp": False}
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
MASTERS, NO_MASTERS = {"keeps": True}, {"keeps": False}
# Kind of weights, their dtype, what our master weights are made with, and the bytes a step moves for an element: it
# reads weight, moments and gradient and writes all but the gradient; with masters the weight too.
KINDS: tuple[tuple[str, torch.dtype, dict[str, bool] | None, int], ...] = (
    ("float32 weights", torch.float32, None, 28),
    ("bfloat16 weights", torch.bfloat16, None, 14),
    ("bfloat16 weights, masters", torch.bfloat16, MASTERS, 28),
    ("bfloat16 weights, rounded at random", torch.bfloat16, NO_MASTERS, 22),
    ("bfloat16 weights, masters in the moments", torch.bfloat16, NO_MASTERS | {"in_moments": True}, 22),
)


def parameters_of(size: str, device: torch.device, dtype: torch.dtype) -> list[tuple[str, nn.Parameter]]:
    """Return the named parameters of a decoder, random, with gradients."""
    named = list(model_of(size, "gqa", device).to(dtype).named_parameters())
    for _, weight in named:
        weight.grad = torch.randn_like(weight).mul_(1e-3)
    return named


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


def adamw_rows(size: str, device: torch.device, repeats: int) -> list[Row]:
    """Measure AdamW's step, ours and torch's, and a copy of as much memory as the largest reads and writes."""
    rows: list[Row] = []

    def add(name: str, call: Callable[[], Any], moved: int) -> None:
        call()  # makes states, of which none is needed for less than a step
        reset_peak(device)
        ms = device_ms(call, device, repeats)
        host = 1e3 * statistics.median(host_seconds(call, device, 1, 1) for _ in range(repeats))
        found = {
            "name": name,
            "device_ms": ms,
            "host_ms": host,
            "bytes": moved,
            "bytes_per_s": moved / ms * 1e3,
        }
        found["share_of_copy"] = found["bytes_per_s"] / (rows[0] if rows else found)["bytes_per_s"]
        rows.append(found | {"peak_bytes": peak_of(device)})

    for kind, dtype, master_weights, bytes_per_element in KINDS:
        named = parameters_of(size, device, dtype)
        weights = [weight for _, weight in named]
        elements = sum(weight.numel() for weight in weights)
        moved = elements * bytes_per_element
        if not rows:
            source, target = (torch.empty(moved // 2, dtype=torch.uint8, device=device) for _ in range(2))
            add("copy", lambda a=target, b=source: a.copy_(b), moved // 2 * 2)
            del source, target
        if master_weights is None:
            ours: Any = AdamW(weights, lr=1e-4)
        else:
            ours = MasterWeights(
                named, lambda copies: AdamW([p for _, p in copies], lr=1e-4), **master_weights
            )
        add(f"{kind}, ours", ours.step, moved)
        del ours  # which would keep these weights and gradients through the kinds after
        if master_weights is not NO_MASTERS and not (master_weights or {}).get("in_moments"):
            is_unmodified = master_weights is None
            theirs: Any = (
                torch.optim.AdamW(weights, lr=1e-4, fused=True) if is_unmodified else Masters(weights, 1e-4)
            )
            add(f"{kind}, torch", theirs.step, moved)
            del theirs
        if master_weights is None:
            gradients = [weight.grad for weight in weights]
            read = elements * dtype.itemsize
            add(f"{kind}, norms of gradients, ours", lambda own=weights: clip_gradients([own], None), read)
            norms = functools.partial(torch._foreach_norm, gradients, 2, dtype=torch.float32)
            add(f"{kind}, norms of gradients, torch", norms, read)
            del gradients, norms
        del weights, named
        release_memory()
    return rows


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_of(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else None


def run(words: argparse.Namespace, record: Record) -> None:
    device = record.device
    kernels.load(device)
    earlier = record.read()
    record.start()
    record.data = earlier | record.data
    if words.adamw:
        record.save(adamw={"size": words.size, "rows": adamw_rows(words.size, device, words.repeats)})
        return

    def add(name: str, call: Callable[[], Any]) -> None:
        ms = time_calls(call, device, words.repeats)
        record.add({"name": name, "ms": statistics.median(ms), "all": ms, "peak_bytes": peak_of(device)})

    record.data |= {"size": words.size, "rows": []}
    for name, settings in OPTIMIZERS.items():
        values = {"phase": "pretrain", "steps": 1, "lr": 1e-4, "weight_decay": 0.1, **settings}
        phase = PhaseConfig.model_validate(values)
        release_memory()
        reset_peak(device)
        named = parameters_of(words.size, device, torch.float32)
        optimizer = build_optimizer(named, phase)
        if phase.has_16_bit_weights:
            for _, weight in named:
                grad, weight.grad = weight.grad, None
                weight.data = weight.data.bfloat16()
                weight.grad = None if grad is None else grad.bfloat16()
        add(name, optimizer.step)
        del optimizer, named
    weights = [weight for _, weight in parameters_of(words.size, device, torch.float32)]
    add("clipping by norm", lambda: clip_gradients([weights], 1.0))
    add("clipping by value", lambda: clip_values([weights], 1.0))
    add("adagc", functools.partial(AdaGC(weights, warmup_steps=1), [weights]))
    record.save(parameters=sum(weight.numel() for weight in weights))
