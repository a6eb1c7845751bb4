"""Calls of the launchers of decode attention, on caches of every layout and format."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tests.ops.launcher_case import BF16, F16, F32, Case, one

NUMBERS = {"fp32": F32, "fp16": F16, "bf16": BF16}
BLOCKS = {
    "q8_0": (32, 32, torch.int8, F16),
    "q4_0": (32, 16, torch.uint8, F16),
    "nf4": (64, 32, torch.uint8, F32),
}
"""Elements, width of codes, and dtypes of codes and scales."""


def stream(kind: str, width: int, batch: int, kv_heads: int, capacity: int, tail: int) -> list[Tensor]:
    """A cache's stream as the op takes it: numbers, or codes, scales and a tail."""
    if kind in NUMBERS:
        return [one(batch, kv_heads, capacity, width, dtype=NUMBERS[kind])]
    if kind == "zeros":
        return [one(width).expand(batch, kv_heads, capacity + tail, width)]
    elements, code_width, codes, scales = BLOCKS[kind]
    n_blocks = -(-kv_heads * width // elements)
    return [
        one(batch, n_blocks, capacity, code_width, dtype=codes),
        one(batch, n_blocks, capacity, 1, dtype=scales),
        one(batch, kv_heads, tail, width),
    ]


def decoding() -> Iterator[Case]:
    dba, narrow, wide = (16, 32, 64), (128, 64, 128), (128, 256, 128)
    for name, dtype, kinds, dims, heads, batch, queries, window, null in (
        ("bf16", BF16, ("bf16",) * 3, dba, (32, 8), 8, 1, 0, False),
        ("bf16, window and null", BF16, ("bf16",) * 3, dba, (32, 8), 8, 1, 1024, True),
        ("bf16, questions", BF16, ("bf16",) * 3, dba, (32, 8), 8, 5, 0, False),
        ("bf16, many sequences", BF16, ("bf16",) * 3, (64, 64, 128), (32, 8), 64, 1, 0, False),
        ("fp16 store", F16, ("fp16",) * 3, dba, (32, 8), 8, 1, 0, False),
        ("fp32", F32, ("fp32",) * 3, (128, 128, 128), (4, 4), 1, 1, 0, True),
        ("q8_0", BF16, ("q8_0",) * 3, dba, (32, 8), 8, 1, 0, False),
        ("q4_0, window and null", BF16, ("q4_0",) * 3, dba, (32, 8), 8, 1, 1024, True),
        ("nf4", BF16, ("nf4",) * 3, dba, (32, 8), 8, 1, 0, False),
        ("nf4 fp16", F16, ("nf4",) * 3, (64, 64, 64), (8, 8), 2, 1, 0, False),
        ("mixed fp16", F16, ("q4_0", "q8_0", "q4_0"), dba, (32, 8), 8, 1, 0, False),
        ("mixed with numbers", BF16, ("q4_0", "bf16", "nf4"), (24, 40, 48), (6, 2), 2, 1, 64, True),
        ("q8_0, keys of one part", BF16, ("q8_0", "zeros", "q8_0"), (64, 16, 64), (32, 8), 8, 1, 0, False),
        ("nf4, keys of one part", F16, ("nf4", "zeros", "q4_0"), (128, 16, 128), (32, 8), 1, 1, 0, True),
        ("q8_0 fp32", F32, ("q8_0",) * 3, (128, 128, 128), (4, 4), 1, 1, 0, False),
        ("latent bf16, wide", BF16, ("bf16",) * 2, wide, (32, 1), 8, 1, 0, True),
        ("latent bf16, widest", BF16, ("bf16",) * 2, (512, 512, 512), (128, 1), 1, 1, 0, False),
        ("q8_0, questions", BF16, ("q8_0",) * 3, (128, 128, 128), (32, 8), 2, 16, 0, False),
        ("latent q4_0 and q8_0", BF16, ("q4_0", "q8_0"), narrow, (32, 1), 8, 1, 0, False),
        ("latent nf4, wide", BF16, ("nf4",) * 2, wide, (32, 1), 8, 1, 0, False),
        ("latent q8_0, widest", F16, ("q8_0",) * 2, (512, 64, 512), (128, 1), 1, 1, 0, False),
    ):
        kv_heads = heads[1]
        capacity = 4096
        streams = [stream(kind, d, batch, kv_heads, capacity, 96) for kind, d in zip(kinds, dims, strict=False)]
        values = streams[2] if len(streams) > 2 else []
        packed = one(1, dtype=torch.int32) if any(kind in BLOCKS for kind in kinds) else None
        rows = [one(kv_heads, d, dtype=dtype) for d in dims[: len(kinds)]] if null else []
        q = [one(batch, heads[0], queries, d, dtype=dtype) for d in dims[:2]]
        stored = ["bf16" if kind == "zeros" else kind for kind in kinds]
        call = (*q, stored, streams[0], streams[1], values, one(batch, dtype=torch.int32), packed, rows)
        # Of many sequences programs are enough without splits, which have to be joined.
        kernels = ("split_kv_kernel", "combine_kernel")[: 1 if batch == 64 else 2]
        yield Case("dba_decode", name, kernels, lambda a=(*call, window, 4096, 0): a)
    split, wide = ("split_kv_kernel",), (128, 256)
    apart = (*split, "combine_kernel", "_values_kernel")
    for name, kinds, dims, batch, queries, n_splits, kernels in (
        ("bf16, one row", ("bf16",) * 2, wide, 1, 1, 64, (*split, "_up_row")),
        ("mixed, one row", ("q4_0", "q8_0"), wide, 1, 1, 33, (*split, "_up_row")),
        ("bf16, one row, more splits", ("bf16",) * 2, wide, 1, 1, 132, (*split, "_up_many")),
        ("mixed, many splits", ("q4_0", "q8_0"), wide, 1, 1, 264, apart),
        ("bf16, questions", ("bf16",) * 2, (128, 64), 1, 8, 8, (*split, "_up_row")),
        ("bf16, questions, many splits", ("bf16",) * 2, (128, 64), 2, 8, 33, apart),
        ("bf16, rows", ("bf16",) * 2, (128, 64), 32, 1, 8, (*split, "_up_rows")),
        ("bf16, odd rows", ("bf16",) * 2, (130, 80), 33, 1, 6, (*split, "_up_rows")),
        ("bf16, widest", ("bf16",) * 2, (512, 64), 16, 1, 4, (*split, "_up_rows")),
        ("bf16, no splits", ("bf16",) * 2, (128, 64), 64, 1, 1, (*split, "_values_kernel")),
        ("bf16, many rows", ("bf16",) * 2, (128, 64), 64, 1, 32, apart),
        ("fp32", ("fp32",) * 2, (128, 64), 32, 1, 8, apart),
    ):
        dtype = F32 if kinds[0] == "fp32" else BF16
        q, up = [one(batch, 32, queries, d, dtype=dtype) for d in dims], one(32, dims[0], 64, dtype=dtype)
        streams = [stream(kind, d, batch, 1, 32768 // batch, 96) for kind, d in zip(kinds, dims, strict=True)]
        packed = one(1, dtype=torch.int32) if any(kind in BLOCKS for kind in kinds) else None
        call = (*q, list(kinds), *streams, one(batch, dtype=torch.int32), packed, up)
        yield Case("dba_decode_up", name, kernels, lambda a=(*call, 0, 4096, n_splits): a)
