"""Time of scaled_dot_product_attention by backend on the shapes of teachers and students, bf16, causal. Writes JSON.

Usage on a GPU: python scripts/bench/run.py attention_backends [--out docs/benchmarks/attention_backends.json]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from record import Record, machine_facts
from timing import device_seconds, interleave, spread
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
# name: batch, query heads, key/value heads, tokens, width of keys, width of values
SHAPES = {
    "Llama 3.2 1B": (8, 32, 8, 2048, 64, 64),
    "its student, latent 128 + 64, expanded": (8, 32, 32, 2048, 128, 64),
    "the same, values padded": (8, 32, 32, 2048, 128, 128),
    "proxy teacher": (64, 12, 3, 1024, 64, 64),
    "its student, latent 48 + 24, absorbed": (32, 12, 1, 1024, 72, 48),
    "the same, whole key as value": (32, 12, 1, 1024, 72, 72),
}


def time_of(call: Callable[[], object], repeats: int = 20) -> dict[str, float]:
    """Return median and middle 60% of milliseconds, by device events, after four calls to warm up."""
    device = torch.device("cuda")
    sides = {"": lambda: device_seconds(call, device)}
    return spread(interleave(sides, repeats=repeats, warm=4)[""])


def measure(shape: tuple[int, ...], backend: SDPBackend) -> dict[str, Any]:
    batch, heads, kv_heads, tokens, width, v_width = shape

    def random_tensor(n: int, d: int) -> torch.Tensor:
        x = torch.randn(batch, tokens, n, d, device="cuda", dtype=torch.bfloat16)
        return x.transpose(1, 2).requires_grad_(True)

    q, k, v = random_tensor(heads, width), random_tensor(kv_heads, width), random_tensor(kv_heads, v_width)

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=1.0, enable_gqa=heads != kv_heads
        )

    gradient = torch.randn(batch, tokens, heads, v_width, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    def both() -> None:
        torch.autograd.grad(forward(), (q, k, v), gradient)

    with sdpa_kernel([backend]):
        try:
            with torch.no_grad():
                found = {"forward": time_of(forward)}
            return found | {"forward_backward": time_of(both)}
        except RuntimeError as error:
            return {"refused": str(error).splitlines()[0]}


def add_options(parser: argparse.ArgumentParser) -> None:
    pass


def run(options: argparse.Namespace, record: Record) -> int | None:
    rows = []
    for name, shape in SHAPES.items():
        for backend in BACKENDS:
            found = measure(shape, backend)
            rows.append(
                {"shape": name, "sizes": shape, "backend": backend.name.removesuffix("_ATTENTION"), **found}
            )
            both = found.get("forward_backward", {}).get("median_ms", float("nan"))
            print(f"{name:40s} {rows[-1]['backend']:10s} forward and backward {both:.3f} ms", flush=True)
    record.write_data(
        {
            **record.head(machine_facts(torch.device("cuda"))),
            "rows": rows,
        },
    )
