"""The kernels that a compiled training step of a 1B model calls, each with the least time that its bytes take.

Usage on a GPU: python scripts/bench/run.py step_kernels [--out docs/benchmarks/step_kernels.json]
About 20 s. `--size tiny` shows on any machine that it runs, and no more.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
from record import Record, machine_facts
from timing import median_seconds
from torch import Tensor

from caramba import kernels
from caramba.ops import implementation
from caramba.ops.cross_entropy_rows import cross_entropy_rows
from caramba.ops.rope_qkv import rope_qkv
from caramba.ops.scale import scale_
from caramba.ops.swiglu import swiglu

ROUNDS = 15
QUEUE_CYCLES = 200_000  # in which the host gets ahead
SIZES = {
    "full": {
        "batch": 8,
        "tokens": 2048,
        "heads": 32,
        "kv_heads": 8,
        "width": 64,
        "d_ff": 8192,
        "classes": 128256,
    },
    "tiny": {"batch": 2, "tokens": 16, "heads": 4, "kv_heads": 2, "width": 8, "d_ff": 32, "classes": 300},
}


class Case:
    """A call, the bytes that it has to read and write, and constants of its kernel's module to try besides."""

    def __init__(
        self,
        name: str,
        call: Callable[[], Any],
        n_bytes: int,
        tries: dict[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.name, self.call, self.n_bytes, self.tries = name, call, n_bytes, tries or {}


def cases(size: dict[str, int], device: torch.device) -> list[Case]:
    batch, tokens, heads, kv_heads = (size[name] for name in ("batch", "tokens", "heads", "kv_heads"))
    rows, width = batch * tokens, (heads + 2 * kv_heads) * size["width"]

    def random_tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    angles = torch.rand(1, tokens, size["width"] // 2, device=device) * 6
    cos, sin = angles.cos(), angles.sin()
    joined = random_tensor(batch, tokens, width).requires_grad_()
    parts = rope_qkv(joined, cos, sin, heads, kv_heads, 0.125)
    grads = [torch.randn_like(x) for x in parts]
    packed = random_tensor(rows, 2 * size["d_ff"]).requires_grad_()
    hidden = swiglu(packed)
    grad = torch.randn_like(hidden)
    n_rows = min(2048, rows)
    logits, weight = (
        random_tensor(n_rows, size["classes"]),
        random_tensor(size["classes"], heads * size["width"]),
    )
    targets = torch.randint(size["classes"], (n_rows,), device=device)
    losses = torch.empty(n_rows, device=device)
    one, half = torch.ones((), device=device), torch.full((), 0.999, device=device)
    unit, tile = rows * size["d_ff"] * 2, {"rope_qkv.TILE": (1024, 4096)}
    return [
        Case("rope_qkv", lambda: rope_qkv(joined, cos, sin, heads, kv_heads, 0.125), 2 * joined.nbytes, tile),
        Case(
            "rope_qkv backward",
            lambda: torch.autograd.grad(parts, joined, grads, retain_graph=True),
            2 * joined.nbytes,
            tile,
        ),
        Case("swiglu packed", lambda: swiglu(packed), 3 * unit),
        Case(
            "swiglu packed backward",
            lambda: torch.autograd.grad(hidden, packed, grad, retain_graph=True),
            5 * unit,
            {"swiglu.BLOCK": (1024, 4096)},
        ),
        Case(
            "cross_entropy_rows",
            lambda: cross_entropy_rows(logits, targets, losses),
            2 * logits.nbytes,
            {"cross_entropy_rows.LANES": (256, 512)},
        ),
        Case("scale_ by 1", lambda: scale_(weight, one), 0),
        Case("scale_", lambda: scale_(weight, half), 2 * weight.nbytes, {"scale.PROGRAMS": (1056, 1 << 20)}),
        Case("torch's product with a number on the device", lambda: weight.mul_(half), 2 * weight.nbytes),
        Case("copy", lambda: hidden.detach().copy_(grad), 2 * unit),
    ]


def try_case(case: Case, device: torch.device) -> dict[str, float]:
    """Times of a case with other constants of its kernel, which stay as they were."""
    found: dict[str, float] = {}
    for name, values in case.tries.items():
        place, _, constant = name.partition(".")
        module = importlib.import_module(f"caramba.kernels.triton.{place}")
        before = getattr(module, constant)
        kept = (
            importlib.import_module("caramba.kernels.triton.signature").LaunchCache,
            importlib.import_module("caramba.kernels.triton.launch").Launches,
        )
        remembered = [item for item in vars(module).values() if isinstance(item, kept)]
        for value in (*values, before):
            setattr(module, constant, value)
            for launches in remembered:
                launches.clear()
            if value != before:
                found[f"{constant}={value}"] = 1e6 * median_seconds(case.call, device, ROUNDS, QUEUE_CYCLES)
    return found


OUT = None
SMOKE_OPTIONS = ("--size", "tiny")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=SIZES, default="full")


def run(arguments: argparse.Namespace, record: Record) -> int | None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernels.load(device)
    began = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for case in cases(SIZES[arguments.size], device):
        us = 1e6 * median_seconds(case.call, device, ROUNDS, QUEUE_CYCLES)
        row = {"name": case.name, "us": us, "bytes": case.n_bytes, "tb_per_s": case.n_bytes / us / 1e6}
        row["other"] = try_case(case, device) if device.type == "cuda" else {}
        rows.append(row)
        others = ", ".join(f"{name} {value:.1f}" for name, value in row["other"].items())
        print(f"{case.name:45} {us:9.1f} us {row['tb_per_s']:6.2f} TB/s  {others}", flush=True)
    result = {
        **record.head(machine_facts(device)),
        "size": arguments.size,
        "kernels": {op: implementation(op, device) for op in ("rope_qkv", "swiglu_packed", "scale_")},
        "rows": rows,
        "seconds": time.perf_counter() - began,
    }
    record.write_data(result)
    return 0
