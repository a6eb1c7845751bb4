"""`store_tokens` against a plain loop: its contract and its reference."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.dba_append import reference_store_tokens, store_tokens

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
N_ROWS, CAPACITY = 4, 6

# Widths and heads of the streams, and widths of the buffers.
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "grouped": ((16, 16), (3, 3), (16, 16)),
    "decoupled": ((4, 6, 12), (2, 2, 2), (4, 6, 12)),
    "heads of their own": ((8, 5), (4, 1), (8, 5)),
    "latent, side by side": ((24, 16), (1, 1), (40,)),
    "two together and one": ((3, 4, 5), (2, 2, 3), (7, 5)),
    "one": ((5,), (2,), (5,)),
    "more than a program's": ((40, 300), (9, 9), (40, 300)),
    "no features": ((8, 0, 8), (2, 2, 2), (16,)),
}
# Rows and places of tokens: the last place of a row, beyond it, before the first, and rows that are none.
PLACES: dict[str, tuple[list[int], list[int]]] = {
    "inside": ([2, 0, 2, 3, 1], [0, 5, 1, 3, 0]),
    "some outside": ([2, -1, 3, 0, 1, 4, 2, 2**40], [5, 0, 6, -1, 2, 0, 0, 1]),
    "all outside": ([4, 0], [0, 6]),
    "none": ([], []),
}


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def arguments(name: str, where: str, dtype: torch.dtype, into: torch.dtype, *, heads_first: bool = False) -> list[Any]:
    """Streams as parts of one product, with queries before them, or as a rotation leaves them: heads before tokens."""
    widths, heads, capacities = CASES[name]
    rows, places = PLACES[where]
    n_tokens = len(rows)
    if heads_first:
        streams = [
            drawn(1, k, n_tokens, d, seed=i, dtype=dtype) for i, (k, d) in enumerate(zip(heads, widths, strict=True))
        ]
    else:
        sizes = [k * d for k, d in zip(heads, widths, strict=True)]
        product = drawn(1, n_tokens, 7 + sum(sizes), seed=1, dtype=dtype)
        streams = [
            part.unflatten(-1, (k, d)).transpose(1, 2)
            for part, k, d in zip(product[..., 7:].split(sizes, -1), heads, widths, strict=True)
        ]
    of_buffers, buffer, column = [], 0, 0
    for k, d in zip(heads, widths, strict=True):
        if column == 0:
            of_buffers.append(k)
        column += d
        if column == capacities[buffer]:
            buffer, column = buffer + 1, 0
    buffers = [
        drawn(N_ROWS, k, CAPACITY, width, seed=9 + i, dtype=into)
        for i, (k, width) in enumerate(zip(of_buffers, capacities, strict=True))
    ]
    ids = (torch.tensor(x, dtype=torch.int64, device=DEVICE) for x in (rows, places))
    return [streams, buffers, *ids]


def looped(streams: list[Tensor], buffers: list[Tensor], rows: Tensor, places: Tensor) -> list[Tensor]:
    """What the buffers hold afterwards, token by token and feature by feature."""
    held = [buffer.clone() for buffer in buffers]
    features = [(stream, d) for stream in streams for d in range(stream.shape[-1])]
    columns = [(buffer, d) for buffer in held for d in range(buffer.shape[-1])]
    for (stream, d), (buffer, column) in zip(features, columns, strict=True):
        for t, (row, place) in enumerate(zip(rows.tolist(), places.tolist(), strict=True)):
            if 0 <= row < N_ROWS and 0 <= place < CAPACITY:
                buffer[row, :, place, column] = stream[0, :, t, d].to(buffer.dtype)
    return held


# Every stream in both orders; places matter to all alike.
CALLS = [(name, "some outside", heads_first) for name in CASES for heads_first in (False, True)]
CALLS += [("grouped", where, False) for where in PLACES if where != "some outside"]


def check(run: Callable[..., None], dtype: torch.dtype, into: torch.dtype) -> None:
    """Numbers are rounded and written, nothing else, so they are the same to the last bit."""
    for name, where, heads_first in CALLS:
        args = arguments(name, where, dtype, into, heads_first=heads_first)
        wanted = looped(*args)
        run(*args)
        for got, want in zip(args[1], wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, msg=f"{name}, {where}")


def check_padding(run: Callable[..., None]) -> None:
    """Of tokens that go to one place one is there, number by number; the others are where they belong."""
    streams, buffers, rows, _ = arguments("grouped", "inside", torch.float32, torch.float32)
    before = [buffer.clone() for buffer in buffers]
    rows, places = rows.new_tensor([1, 1, 1, 0, 1]), rows.new_tensor([0, 5, 5, 5, 5])
    run(streams, buffers, rows, places)
    for x, buffer, held in zip(streams, buffers, before, strict=True):
        padded = x[0][:, [1, 2, 4]]
        assert (buffer[1, :, 5][:, None] == padded).any(1).all()
        held[1, :, 5], held[1, :, 0], held[0, :, 5] = buffer[1, :, 5], x[0, :, 0], x[0, :, 3]
        torch.testing.assert_close(buffer, held, rtol=0, atol=0)


def test_the_reference_equals_a_loop_and_writes_nowhere_else() -> None:
    check(reference_store_tokens, torch.float64, torch.float64)
    check(store_tokens, torch.float32, torch.bfloat16)
    check(store_tokens, torch.bfloat16, torch.float16)
    check_padding(store_tokens)


def test_buffers_without_rows_or_places_take_nothing() -> None:
    streams, buffers, rows, places = arguments("decoupled", "inside", torch.float32, torch.float32)
    for empty in ([buffer[:0] for buffer in buffers], [buffer[:, :, :0] for buffer in buffers]):
        store_tokens(streams, empty, rows, places)


@pytest.mark.parametrize("name", CASES)
def test_the_contract_holds_under_opcheck(name: str) -> None:
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    args = arguments(name, "some outside", torch.float32, torch.float16)
    torch.library.opcheck(torch.ops.caramba.store_tokens.default, tuple(args), test_utils=tests)


def test_bad_input_is_named() -> None:
    good = dict(
        zip(
            ("streams", "buffers", "rows", "places"),
            arguments("decoupled", "inside", torch.float32, torch.float32),
            strict=True,
        )
    )
    streams, buffers, rows, places = good.values()

    def refused(match: str, **changed: Any) -> None:
        before = [buffer.clone() for buffer in buffers]
        with pytest.raises(ConfigError, match=match) as caught:
            store_tokens(**(good | changed))
        assert isinstance(caught.value, ValueError)
        assert all(torch.equal(*pair) for pair in zip(before, buffers, strict=True))

    refused(r"store_tokens: streams: got 0, expected 1 to 3", streams=[])
    refused(r"streams: got 4, expected 1 to 3", streams=[*streams, streams[0]])
    refused(r"buffers: got 0, expected one at least", buffers=[])
    refused(
        r"streams: got torch.int32 \[1, 2, 5, 6\] on \w+.*, expected floating \[1, K, 5, D\]",
        streams=[streams[0], streams[1].int(), streams[2]],
    )
    refused(
        r"streams: got .*\[2, 2, 5, 4\].*, expected floating \[1, K, 5, D\]",
        streams=[streams[0].expand(2, -1, -1, -1), *streams[1:]],
    )
    refused(
        r"streams: got .*\[2, 5, 4\].*, expected floating \[1, K, T, D\]",
        streams=[streams[0][0], *streams[1:]],
    )
    refused(
        r"streams: got .*\[1, 2, 4, 12\].*, expected floating \[1, K, 5, D\]",
        streams=[*streams[:2], streams[2][:, :, 1:]],
    )
    refused(
        r"buffers: got .*\[4, 2, 5, 12\].*, expected floating \[4, K, 6, W\]",
        buffers=[*buffers[:2], buffers[2][:, :, 1:]],
    )
    refused(
        r"buffers: got .*\[3, 2, 6, 12\].*, expected floating \[4, K, 6, W\]",
        buffers=[*buffers[:2], buffers[2][1:]],
    )
    refused(
        r"buffers: got stride 2 along the last axis, expected 1",
        buffers=[*buffers[:2], drawn(N_ROWS, 2, CAPACITY, 24, seed=1)[..., ::2]],
    )
    refused(
        r"buffers: got streams of width \[4, 6, 12\], expected ones that fill widths \[4, 6\]",
        buffers=buffers[:2],
    )
    refused(r"streams: got 1 heads, expected the 2 of their buffer", streams=[streams[0][:, :1], *streams[1:]])
    refused(r"buffers: got .* on meta, expected floating .* on ", buffers=[*buffers[:2], buffers[2].to("meta")])
    refused(r"streams: got .* on meta, expected floating .* on ", streams=[*streams[:2], streams[2].to("meta")])
    refused(r"places: got .* on meta, expected torch.int64", places=places.to("meta"))
    refused(r"rows: got torch.int32 \[5\] on .*, expected torch.int64 \[5\]", rows=rows.int())
    refused(r"places: got torch.int64 \[4\] on .*, expected torch.int64 \[5\]", places=places[1:])
