"""`dba_append` against a plain loop: its contract and its reference."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.dba_append import dba_append, reference_dba_append

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
CAPACITY = 6

# Widths of the streams and of the buffers, heads, the one that turns, and the groups of its tables.
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, int, int]] = {
    "standard": ((8, 8), (8, 8), 4, 0, 1),
    "per head": ((4, 6, 12), (4, 6, 12), 4, 1, 2),
    "latent, side by side": ((24, 16), (40,), 1, 1, 1),
    "nothing turns": ((5,), (5,), 2, -1, 1),
}


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def arguments(
    name: str, lengths: list[int], n_tokens: int, dtype: torch.dtype, into: torch.dtype, per_row: bool = False
) -> list[Any]:
    widths, capacities, heads, rotated, groups = CASES[name]
    batch = len(lengths)
    # As projections give them: heads inside tokens.
    streams = [
        drawn(batch, n_tokens, heads, width, seed=i, dtype=dtype).transpose(1, 2) for i, width in enumerate(widths)
    ]
    buffers = [drawn(batch, heads, CAPACITY, width, seed=9 + i, dtype=into) for i, width in enumerate(capacities)]
    tables: list[Tensor | None] = [None, None]
    if rotated >= 0:
        shape = ((batch,) if per_row else ()) + (groups, n_tokens, widths[rotated] // 2)
        angles = drawn(*shape, seed=20, dtype=torch.float32)
        tables = [angles.cos(), angles.sin()]
    return [streams, buffers, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), *tables, rotated]


def looped(
    streams: list[Tensor], buffers: list[Tensor], lengths: Tensor, cos: Any, sin: Any, rotated: int
) -> list[Tensor]:
    """What the buffers hold afterwards, one number at a time by complex multiplication."""
    batch, heads, n_tokens, _ = streams[0].shape
    sides = []
    for index, x in enumerate(streams):
        if index == rotated:
            tables = [table.double().expand(batch, *table.shape[-3:]) for table in (cos, sin)]
            turn = torch.complex(*(t.repeat_interleave(heads // t.shape[1], 1) for t in tables))
            turned = torch.complex(*x.double().chunk(2, -1)) * turn
            x = torch.cat((turned.real, turned.imag), -1).to(x.dtype)
        sides.append(x)
    whole = torch.cat([side.to(buffers[0].dtype) for side in sides], -1)
    held = torch.cat(buffers, -1).clone()
    for b, length in enumerate(lengths.tolist()):
        for t in range(n_tokens):
            if 0 <= length + t < CAPACITY:
                held[b, :, length + t] = whole[b, :, t]
    return list(held.split([buffer.shape[-1] for buffer in buffers], -1))


def check(run: Callable[..., None], dtype: torch.dtype, into: torch.dtype, tolerance: float) -> None:
    # The end, beyond it, before the start, and some that only partly fit.
    places = (([5, 6, -1, 2**30], 1, True), ([4, 1], 4, True), ([0, 3], 1, False), ([], 1, False))
    for i, name in enumerate(CASES):
        for lengths, n_tokens, per_row in places if i == 0 else places[:3]:
            args = arguments(name, lengths, n_tokens, dtype, into, per_row)
            wanted = looped(*args)
            run(*args)
            for got, want in zip(args[1], wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_the_reference_equals_a_loop_and_writes_nowhere_else() -> None:
    check(reference_dba_append, torch.float64, torch.float64, 1e-12)
    check(dba_append, torch.float32, torch.bfloat16, 1e-2)


@pytest.mark.parametrize("name", CASES)
def test_the_contract_holds_under_opcheck(name: str) -> None:
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    args = arguments(name, [2, 6], 1, torch.float32, torch.float16, per_row=True)
    torch.library.opcheck(torch.ops.caramba.dba_append.default, tuple(args), test_utils=tests)


def test_bad_input_is_named() -> None:
    def refused(match: str, **changed: Any) -> None:
        names = ("streams", "buffers", "lengths", "cos", "sin", "rotated")
        args = arguments("per head", [1, 2], 1, torch.float32, torch.float32)
        with pytest.raises(ConfigError, match=match):
            dba_append(*(dict(zip(names, args, strict=True)) | changed).values())

    good = arguments("per head", [1, 2], 1, torch.float32, torch.float32)
    refused(
        r"dba_append: lengths: got torch.int64 \[2\] on (cpu|cuda:0), expected int32 \[2\]",
        lengths=good[2].long(),
    )
    refused(
        r"buffers: got streams of width \[4, 6, 12\], expected ones that fill widths \[4, 6\]",
        buffers=good[1][:2],
    )
    refused(r"rotated: got 3, expected -1 without cos and sin, with them 0 to 2", rotated=3)
    refused(
        r"cos, sin: got .*expected both floating \[G, 1, 3\], or the same with 2 in front, G a divisor of 4",
        cos=good[3][..., :2],
    )
    refused(
        r"streams: got torch.int32 .*expected floating \[2, 4, 1, D\]",
        streams=[good[0][0], good[0][1].int(), good[0][2]],
    )
    refused(
        r"buffers: got stride 2 along the last axis",
        buffers=[*good[1][:2], drawn(2, 4, 6, 24, seed=1)[..., ::2]],
    )
