"""The op `caramba::store_tokens`: tokens of one packed row into a cache's buffers, to a row and a place each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import caramba_op, direct
from caramba.ops.dba_append import columns
from caramba.ops.first_order import refuse_gradients

MOST_STREAMS = 3


def store_tokens(streams: Sequence[Tensor], buffers: Sequence[Tensor], rows: Tensor, places: Tensor) -> None:
    """Write token t of every stream at row rows[t] and place places[t] of the buffers, in their dtype.

    Streams fill the buffers in order, side by side: a buffer as wide as two streams takes both. A token whose row or
    place is outside the buffers is not written. Where several go to one place each number there is of one of them, and
    which one may differ from number to number: nobody reads what padding left.

    Shape: one to three streams [1, K_i, T, D_i] floating, of any strides; buffers [B, K_j, S, W_j] floating with a unit
    stride along W, of the same B and S, sum of D_i = sum of W_j, and streams of the K_j of the buffer that takes them;
    rows and places int64 [T].

    Raises:
        ConfigError: an argument of another shape, dtype, device or stride, or gradients that are wanted; it is a
            ValueError.
    """
    given, into = list(streams), list(buffers)
    refuse_gradients("store_tokens", *given)
    run = (
        direct("store_tokens", given[0], into[0], rows)
        if given and into and not torch.is_grad_enabled()
        else None
    )
    if run is not None:
        run(given, into, rows, places, admit=check_store_tokens)
        # As the op would, so that a backward through what has changed is refused.
        torch.autograd.graph.increment_version([x for x in into if not x.is_inference()])
        return
    check_store_tokens(given, into, rows, places)
    torch.ops.caramba.store_tokens.default(given, into, rows, places)


def check_store_tokens(streams: list[Tensor], buffers: list[Tensor], rows: Tensor, places: Tensor) -> None:
    """Refuse what the op does not take, by shapes and dtypes alone."""
    if not 1 <= len(streams) <= MOST_STREAMS:
        raise _wrong("streams", len(streams), f"1 to {MOST_STREAMS}")
    if not buffers:
        raise _wrong("buffers", 0, "one at least")
    device, n_tokens = streams[0].device, streams[0].shape[2] if streams[0].dim() == 4 else "T"
    for x in streams:
        fits = x.dim() == 4 and x.shape[0] == 1 and x.shape[2] == n_tokens
        if not fits or not x.is_floating_point() or x.device != device:
            raise _wrong("streams", _said(x), f"floating [1, K, {n_tokens}, D] on {device}")
    n_rows, capacity = (buffers[0].shape[0], buffers[0].shape[2]) if buffers[0].dim() == 4 else ("B", "S")
    for x in buffers:
        fits = x.dim() == 4 and (x.shape[0], x.shape[2]) == (n_rows, capacity)
        if not fits or not x.is_floating_point() or x.device != device:
            raise _wrong("buffers", _said(x), f"floating [{n_rows}, K, {capacity}, W] on {device}")
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise _wrong("buffers", f"stride {x.stride(-1)} along the last axis", "1")
    widths = [x.shape[-1] for x in streams], [x.shape[-1] for x in buffers]
    found = columns(*widths)
    if found is None:
        raise _wrong(
            "buffers", f"streams of width {widths[0]}", f"ones that fill widths {widths[1]} in order"
        )
    for x, (buffer, _) in zip(streams, found, strict=True):
        if x.shape[1] != buffers[buffer].shape[1]:
            raise _wrong("streams", f"{x.shape[1]} heads", f"the {buffers[buffer].shape[1]} of their buffer")
    for name, x in (("rows", rows), ("places", places)):
        if tuple(x.shape) != (n_tokens,) or x.dtype != torch.int64 or x.device != device:
            raise _wrong(name, _said(x), f"torch.int64 [{n_tokens}] on {device}")


def _said(x: Tensor) -> str:
    return f"{x.dtype} {list(x.shape)} on {x.device}"


def _wrong(name: str, got: object, expected: str) -> ConfigError:
    return ConfigError(f"store_tokens: {name}: got {got}, expected {expected}")


@caramba_op(
    "store_tokens",
    fake=check_store_tokens,
    mutates=("buffers",),
)
def reference_store_tokens(
    streams: list[Tensor], buffers: list[Tensor], rows: Tensor, places: Tensor
) -> None:
    """Compute the op in plain PyTorch, without a wait for the device."""
    found = columns([x.shape[-1] for x in streams], [x.shape[-1] for x in buffers])
    assert found is not None  # checked before the call
    n_rows, capacity = buffers[0].shape[0], buffers[0].shape[2]
    if not (len(rows) and n_rows and capacity):
        return
    is_inside = (rows >= 0) & (rows < n_rows) & (places >= 0) & (places < capacity)
    # In the place of a token that goes nowhere the first that goes somewhere is written once more. Without any, what
    # is there is written back.
    token = torch.where(
        is_inside, torch.arange(len(rows), device=rows.device), is_inside.to(torch.int64).argmax()
    )
    row, place = rows[token].clamp(0, n_rows - 1), places[token].clamp(0, capacity - 1)
    is_any = is_inside[token][:, None, None]
    for x, (buffer, column) in zip(streams, found, strict=True):
        into = buffers[buffer][..., column : column + x.shape[-1]].transpose(1, 2)
        values = x[0].transpose(0, 1)[token].to(into.dtype)
        into[row, place] = torch.where(is_any, values, into[row, place])
