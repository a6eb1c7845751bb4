"""Calls of the launchers that store tokens in buffers of caches, as `kernel_cases` has those of the others."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.ops.launcher_case import BF16, F16, F32, Case, one


def appended() -> Iterator[Case]:
    for name, dtype, store, widths, joins, rotated, per_row in (
        ("standard", BF16, BF16, (64, 64), (1, 1), 0, False),
        ("decoupled", BF16, BF16, (16, 32, 64), (1, 1, 1), 1, False),
        ("decoupled, tables of rows, into fp16", BF16, F16, (16, 32, 64), (2, 1), 1, True),
        ("latent, widest", F16, F16, (512, 64), (2,), 1, False),
        ("no turn", F32, F32, (64, 64), (1, 1), -1, False),
    ):
        streams = [one(2, 1, 4, d, dtype=dtype).transpose(1, 2) for d in widths]
        left, buffers = list(widths), []
        for n in joins:
            buffers.append(one(2, 4, 256, sum(left[:n]), dtype=store))
            del left[:n]
        table = one(*((2,) if per_row else ()), 1, 1, widths[rotated] // 2, dtype=F32) if rotated >= 0 else None
        call = (streams, buffers, one(2, dtype=torch.int32), table, table, rotated)
        yield Case("dba_append", name, ("_append",), lambda a=call: a)


def stored_tokens() -> Iterator[Case]:
    for name, dtype, store, n_tokens, heads, widths, joins in (
        ("grouped", BF16, BF16, 384, 8, (64, 64), (1, 1)),
        ("many heads, wide", BF16, BF16, 2048, 32, (128, 128), (1, 1)),
        ("decoupled, into fp16", BF16, F16, 384, 8, (16, 32, 64), (1, 1, 1)),
        ("latent, side by side", BF16, BF16, 384, 1, (128, 64), (2,)),
        ("latent, widest", F16, F16, 384, 1, (512, 64), (2,)),
        ("uneven", F32, F32, 65, 3, (40, 24), (1, 1)),
    ):
        # Parts of a product of queries, keys and values.
        sizes = [heads * d for d in widths]
        parts = one(1, n_tokens, 2048 + sum(sizes), dtype=dtype)[..., 2048:].split(sizes, -1)
        streams = [part.unflatten(-1, (heads, d)).transpose(1, 2) for part, d in zip(parts, widths, strict=True)]
        left, buffers = list(widths), []
        for n in joins:
            buffers.append(one(8, heads, 4096, sum(left[:n]), dtype=store))
            del left[:n]
        call = (streams, buffers, one(n_tokens, dtype=torch.int64), one(n_tokens, dtype=torch.int64))
        yield Case("store_tokens", name, ("_store_tokens",), lambda a=call: a)
