"""Attention layers on rows of documents, forward and backward: variable-length against a mask. Writes JSON.

Usage on a GPU: python scripts/bench/run.py documents [--out docs/benchmarks/documents.json]
A machine without one runs it with --batch 1 --tokens 64, which shows that it works and no more: it has the mask alone.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from record import Record, machine_facts
from timing import interleave, spread, wall_seconds
from torch import Tensor

from caramba.config.layer import AttentionLayerConfig, AttentionMode
from caramba.layer import AttentionLayer, Documents, attention_backends
from caramba.layer.varlen import VarlenKernel, find_kernel, varlen_attention

ROUNDS = 15
LAYERS: dict[str, dict[str, Any]] = {
    "Llama 3.2 1B": {"mode": AttentionMode.GQA, "n_heads": 32, "n_kv_heads": 8},
    "per head, 16 + 32": {
        **{"mode": AttentionMode.DECOUPLED, "n_heads": 32, "n_kv_heads": 8},
        **{"sem_dim": 32 * 16, "geo_dim": 32 * 32, "v_dim": 32 * 64},
    },
}


def rows_of(batch: int, tokens: int, n_documents: int, device: torch.device) -> Tensor:
    """Document ids [B, T], cut at places of a fixed seed."""
    generator = torch.Generator().manual_seed(n_documents)
    cuts = torch.stack(
        [torch.randperm(tokens - 1, generator=generator)[: n_documents - 1] for _ in range(batch)]
    )
    begins = torch.zeros(batch, tokens, dtype=torch.int64)
    begins.scatter_(1, cuts + 1, 1)
    return begins.cumsum(1).to(device)


def measure(
    layer: AttentionLayer, x: Tensor, ids: Tensor, kernel: VarlenKernel | None
) -> dict[str, dict[str, Any]]:
    """Time both paths in turn, what a batch needs of its documents included, and their difference."""
    device = x.device
    is_half = device.type == "cuda"
    paths: dict[str, VarlenKernel | None] = {"mask": None} | ({} if kernel is None else {"varlen": kernel})

    def step(active: VarlenKernel | None) -> Tensor:
        layer.zero_grad(set_to_none=True)
        with varlen_attention(active), torch.autocast(device.type, torch.bfloat16, enabled=is_half):
            out = layer(x, Documents.of(ids))
            out.float().square().mean().backward()
        return out.detach().float()

    outputs = {name: step(active) for name, active in paths.items()}
    found: dict[str, dict[str, Any]] = {name: {} for name in paths}
    for name, active in paths.items():
        if is_half:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step(active)
            found[name]["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    sides = {
        name: lambda active=active: wall_seconds(lambda: step(active), device)
        for name, active in paths.items()
    }
    for name, series in interleave(sides, repeats=ROUNDS).items():
        found[name] |= spread(series) | {
            "difference": float((outputs[name] - outputs["mask"]).norm() / outputs["mask"].norm()),
        }
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)


def run(options: argparse.Namespace, record: Record) -> int | None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernel = find_kernel(device)
    if isinstance(kernel, str):
        print(kernel)
    rows = []
    with attention_backends(device):
        for name, words in LAYERS.items():
            torch.manual_seed(0)
            layer = AttentionLayer(AttentionLayerConfig(d_model=2048, **words)).to(device)
            x = torch.randn(options.batch, options.tokens, 2048, device=device)
            for n_documents in (1, 4, 16, 64):
                ids = rows_of(options.batch, options.tokens, min(n_documents, options.tokens), device)
                found = measure(layer, x, ids, None if isinstance(kernel, str) else kernel)
                rows.append({"layer": name, "documents": n_documents, "paths": found})
                print(
                    name,
                    n_documents,
                    {path: round(row["median_ms"], 3) for path, row in found.items()},
                    flush=True,
                )
    record.write_data(
        {
            **record.head(machine_facts(device)),
            "sizes": [options.batch, options.tokens],
            "varlen": kernel if isinstance(kernel, str) else "available",
            "rows": rows,
        },
    )
