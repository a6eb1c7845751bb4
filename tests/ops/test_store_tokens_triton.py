"""The Triton kernel of `store_tokens` against a plain loop, on a GPU or, by `test_in_the_interpreter.py`,
interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from caramba.ops.dba_append import reference_store_tokens
from tests.ops.test_store_tokens import (
    CASES,
    DEVICE,
    INTERPRETED,
    PLACES,
    arguments,
    check,
    check_padding,
    looped,
)

runs = pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="runs in the interpreter's process")


def launched(*given: Any) -> None:
    from caramba.kernels.triton.store_tokens import store_tokens

    store_tokens(*given)


@runs
@pytest.mark.parametrize(("dtype", "into"), [(torch.float32, torch.float16), (torch.float16, torch.float32)])
def test_the_kernel_equals_a_loop_and_writes_nowhere_else(dtype: torch.dtype, into: torch.dtype) -> None:
    check(launched, dtype, into)


@runs
def test_of_padding_one_token_is_left() -> None:
    check_padding(launched)


@runs
def test_what_the_kernel_does_not_take_is_refused() -> None:
    streams, buffers, *ids = arguments("grouped", "inside", torch.float32, torch.float32)
    with pytest.raises(ValueError, match=r"got 2 and torch.float64, .*expected at most 3 streams, of 16 or 32"):
        launched([x.double() for x in streams], buffers, *ids)
    with pytest.raises(ValueError, match=r"got 4 and .*expected at most 3 streams"):
        launched(streams * 2, buffers * 2, *ids)


@runs
def test_features_rows_and_places_may_lie_apart() -> None:
    streams, buffers, rows, places = arguments("decoupled", "inside", torch.float32, torch.float32)
    wanted = looped(streams, buffers, rows, places)
    apart = [x.repeat_interleave(2, -1)[..., ::2] for x in streams]
    rows_apart, places_apart = (x[:, None].repeat(1, 2)[:, 0] for x in (rows, places))
    for given in (streams, apart):  # the one's plan is not the other's
        for ids in ((rows, places), (rows_apart, places), (rows, places_apart)):
            into = [torch.zeros_like(buffer) for buffer in buffers]
            for new, buffer in zip(into, buffers, strict=True):
                new.copy_(buffer)
            launched(given, into, *ids)
            for got, want in zip(into, wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("dtype", "into"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
    ],
)
def test_the_kernel_rounds_as_the_reference(dtype: torch.dtype, into: torch.dtype) -> None:
    for name in CASES:
        for where in PLACES:
            args, same = (arguments(name, where, dtype, into) for _ in range(2))
            launched(*args)
            reference_store_tokens(*same)
            for got, want in zip(args[1], same[1], strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_a_graph_writes_where_its_rows_and_places_then_say() -> None:
    streams, buffers, rows, places = arguments("grouped", "inside", torch.bfloat16, torch.bfloat16)
    launched(streams, [buffer.clone() for buffer in buffers], rows, places)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launched(streams, buffers, rows, places)
    for row, place in ((rows.flip(0), places.flip(0)), (rows + 1, places - 1)):
        wanted = looped(streams, buffers, row, place)
        rows.copy_(row)
        places.copy_(place)
        graph.replay()
        for got, want in zip(buffers, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)
