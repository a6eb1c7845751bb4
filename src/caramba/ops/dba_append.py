"""Ops that write new tokens into cache buffers: at each row's length, or at listed rows and places."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from caramba.ops.backend import caramba_op, describe, direct, refusal, refuse_gradients, upcast
from caramba.ops.dba_decode import put
from caramba.ops.rope import rotate_pairs, tables_fit


def dba_append(
    streams: Sequence[Tensor],
    buffers: Sequence[Tensor],
    lengths: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    rotated: int = -1,
) -> None:
    """Append tokens to cache buffers in place: token t of sequence b at slot lengths[b] + t.

    Values are cast to the buffers' dtype; other slots do not change. Streams fill the buffers in order: a buffer as
    wide as two streams takes both, concatenated. Stream `rotated`
    goes through RoPE first, y[p] = x[p] cos - x[p + D/2] sin, y[p + D/2] = x[p + D/2] cos + x[p] sin, in at least
    fp32, rounded to its own dtype and then to the buffer's. A slot outside the buffer is not written; callers that know
    the lengths on the host check them before. `lengths` does not change.

    Shape: streams [B, K, T, D_i] floating, buffers [B, K, S, W_j] fp32, fp16, bf16 or fp64 with a unit stride along
    W, sum of D_i = sum of W_j; lengths int32 [B]; cos and sin [G, T, D/2] or [B, G, T, D/2], G a divisor of K.

    Raises:
        ConfigError: an argument of another shape, dtype, device or stride, or gradients that are wanted: what a
            cache holds has none.

    Reference: Su et al., 2021, arXiv:2104.09864 (RoPE).
    """
    given, into = list(streams), list(buffers)
    _run("dba_append", check_dba_append, given, into, lengths, cos, sin, rotated)


def _run(op: str, check: Callable[..., None], given: list[Tensor], into: list[Tensor], *rest: Any) -> None:
    """Run an op that writes streams into buffers, straight away where `direct` does."""
    refuse_gradients(op, *given)
    is_direct = given and into and not torch.is_grad_enabled()
    run = direct(op, given[0], into[0], rest[0]) if is_direct else None
    if run is None:
        check(given, into, *rest)
        getattr(torch.ops.caramba, op).default(given, into, *rest)
        return
    run(given, into, *rest, admit=check)
    # As the op would, so that a backward through what has changed is refused.
    torch.autograd.graph.increment_version([x for x in into if not x.is_inference()])


def check_dba_append(
    streams: list[Tensor],
    buffers: list[Tensor],
    lengths: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    rotated: int,
) -> None:
    """Refuse what the op does not take, by shapes and dtypes alone."""
    if not streams or not buffers:
        raise refusal("dba_append", "streams, buffers", f"{len(streams)} and {len(buffers)}", "one at least of each")
    batch, heads, n_tokens = streams[0].shape[:3] if streams[0].dim() == 4 else ("B", "K", "T")
    device, capacity = streams[0].device, buffers[0].shape[2] if buffers[0].dim() == 4 else "S"
    _check_parts("dba_append", "streams", streams, (batch, heads, n_tokens, "D"), device)
    _check_parts("dba_append", "buffers", buffers, (batch, heads, capacity, "W"), device)
    _filled("dba_append", streams, buffers)
    if tuple(lengths.shape) != (batch,) or lengths.dtype != torch.int32 or lengths.device != device:
        raise refusal("dba_append", "lengths", describe(lengths), f"int32 [{batch}] on {device}")
    _check_tables(streams, cos, sin, rotated)


def _check_parts(op: str, name: str, parts: list[Tensor], shape: Sequence[int | str], device: torch.device) -> None:
    """Refuse streams or buffers of another shape, of which letters stand for any size."""
    for x in parts:
        fits = x.dim() == 4 and all(isinstance(n, str) or size == n for size, n in zip(x.shape, shape, strict=True))
        if not fits or not x.is_floating_point() or x.device != device:
            wanted = f"floating [{', '.join(map(str, shape))}] on {device}"
            raise refusal(op, name, describe(x), wanted)
        if name == "buffers" and x.stride(-1) != 1 and x.shape[-1] > 1:
            raise refusal(op, name, f"stride {x.stride(-1)} along the last axis", "1")


def _filled(op: str, streams: list[Tensor], buffers: list[Tensor]) -> list[tuple[int, int]]:
    """Return the buffer and first column of each stream; refuse streams that do not fill the buffers."""
    widths = [x.shape[-1] for x in streams], [x.shape[-1] for x in buffers]
    found = columns(*widths)
    if found is None:
        wanted = f"ones that fill widths {widths[1]} in order"
        raise refusal(op, "buffers", f"streams of width {widths[0]}", wanted)
    return found


def _check_tables(streams: list[Tensor], cos: Tensor | None, sin: Tensor | None, rotated: int) -> None:
    if not -1 <= rotated < len(streams) or (cos is None) != (rotated == -1) or (cos is None) != (sin is None):
        raise refusal("dba_append", "rotated", rotated, f"-1 without cos and sin, with them 0 to {len(streams) - 1}")
    if cos is None or sin is None:
        return
    (batch, heads, n_tokens, width), table = streams[rotated].shape, cos.shape
    fits = width % 2 == 0 and tables_fit(table, batch, heads, n_tokens, width)
    places = cos.device == sin.device == streams[0].device
    if not (fits and places and cos.is_floating_point()) or sin.shape != table or sin.dtype != cos.dtype:
        raise refusal(
            "dba_append",
            "cos, sin",
            f"{describe(cos)} and {describe(sin)}",
            f"both floating [G, {n_tokens}, {width // 2}], or the same with {batch} in front, G a divisor of {heads}, "
            f"on {streams[0].device}",
        )


def columns(widths: Sequence[int], capacities: Sequence[int]) -> list[tuple[int, int]] | None:
    """Return the buffer and first column of each stream, or None where the streams do not fill the buffers."""
    places: list[tuple[int, int]] = []
    buffer = column = 0
    for width in widths:
        if buffer == len(capacities) or column + width > capacities[buffer]:
            return None
        places.append((buffer, column))
        column += width
        if column == capacities[buffer]:
            buffer, column = buffer + 1, 0
    return places if buffer == len(capacities) else None


def reference_dba_append(
    streams: list[Tensor],
    buffers: list[Tensor],
    lengths: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    rotated: int,
) -> None:
    """Compute the op in plain PyTorch, without a wait for the device."""
    _append(streams, buffers, cos, sin, rotated, lambda x, into: _write(x, into, lengths))


@caramba_op("dba_append", fake=check_dba_append, mutates=("buffers",))
def host_dba_append(
    streams: list[Tensor],
    buffers: list[Tensor],
    lengths: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    rotated: int,
) -> None:
    """Compute the op where no kernel is attached: on a CPU, which knows the places, by plain copies."""
    if not lengths.is_cpu:
        reference_dba_append(streams, buffers, lengths, cos, sin, rotated)
        return
    starts = lengths.tolist()
    _append(streams, buffers, cos, sin, rotated, lambda x, into: put(x, into, starts))


def _append(
    streams: list[Tensor],
    buffers: list[Tensor],
    cos: Tensor | None,
    sin: Tensor | None,
    rotated: int,
    write: Callable[[Tensor, Tensor], None],
) -> None:
    places = _filled("dba_append", streams, buffers)
    for index, (x, (buffer, column)) in enumerate(zip(streams, places, strict=True)):
        if index == rotated and cos is not None and sin is not None:
            x = _turned(x, cos, sin)
        write(x, buffers[buffer][..., column : column + x.shape[-1]])


def _write(x: Tensor, into: Tensor, lengths: Tensor) -> None:
    capacity = into.shape[2]
    if not capacity:
        return
    # One token after the other: where a place is clamped, what is there is written back, and two may share it.
    for t in range(x.shape[2]):
        place = lengths.long() + t
        at = place.clamp(0, capacity - 1)[:, None, None, None].expand(-1, *into.shape[1:2], 1, into.shape[3])
        is_inside = ((place >= 0) & (place < capacity))[:, None, None, None]
        kept = into.gather(2, at)
        into.scatter_(2, at, torch.where(is_inside, x[:, :, t : t + 1].to(into.dtype), kept))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = upcast(x)
    repeats = 1 if cos.shape[-3] == 1 else x.shape[1] // cos.shape[-3]
    cos, sin = cos.to(wide.dtype), sin.to(wide.dtype)
    if repeats > 1:
        cos, sin = cos.repeat_interleave(repeats, -3), sin.repeat_interleave(repeats, -3)
    return rotate_pairs(wide, cos, sin).to(x.dtype)


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
    _run("store_tokens", check_store_tokens, given, into, rows, places)


def check_store_tokens(streams: list[Tensor], buffers: list[Tensor], rows: Tensor, places: Tensor) -> None:
    """Refuse what the op does not take, by shapes and dtypes alone."""
    if not 1 <= len(streams) <= MOST_STREAMS:
        raise refusal("store_tokens", "streams", len(streams), f"1 to {MOST_STREAMS}")
    if not buffers:
        raise refusal("store_tokens", "buffers", 0, "one at least")
    device, n_tokens = streams[0].device, streams[0].shape[2] if streams[0].dim() == 4 else "T"
    _check_parts("store_tokens", "streams", streams, (1, "K", n_tokens, "D"), device)
    n_rows, capacity = (buffers[0].shape[0], buffers[0].shape[2]) if buffers[0].dim() == 4 else ("B", "S")
    _check_parts("store_tokens", "buffers", buffers, (n_rows, "K", capacity, "W"), device)
    found = _filled("store_tokens", streams, buffers)
    for x, (buffer, _) in zip(streams, found, strict=True):
        if x.shape[1] != buffers[buffer].shape[1]:
            wanted = f"the {buffers[buffer].shape[1]} of their buffer"
            raise refusal("store_tokens", "streams", f"{x.shape[1]} heads", wanted)
    for name, x in (("rows", rows), ("places", places)):
        if tuple(x.shape) != (n_tokens,) or x.dtype != torch.int64 or x.device != device:
            raise refusal("store_tokens", name, describe(x), f"torch.int64 [{n_tokens}] on {device}")


@caramba_op("store_tokens", fake=check_store_tokens, mutates=("buffers",))
def reference_store_tokens(streams: list[Tensor], buffers: list[Tensor], rows: Tensor, places: Tensor) -> None:
    """Compute the op in plain PyTorch, without a wait for the device."""
    found = _filled("store_tokens", streams, buffers)
    n_rows, capacity = buffers[0].shape[0], buffers[0].shape[2]
    if not (len(rows) and n_rows and capacity):
        return
    is_inside = (rows >= 0) & (rows < n_rows) & (places >= 0) & (places < capacity)
    # In the place of a token that goes nowhere the first that goes somewhere is written once more. Without any, what
    # is there is written back.
    token = torch.where(is_inside, torch.arange(len(rows), device=rows.device), is_inside.to(torch.int64).argmax())
    row, place = rows[token].clamp(0, n_rows - 1), places[token].clamp(0, capacity - 1)
    is_any = is_inside[token][:, None, None]
    for x, (buffer, column) in zip(streams, found, strict=True):
        into = buffers[buffer][..., column : column + x.shape[-1]].transpose(1, 2)
        values = x[0].transpose(0, 1)[token].to(into.dtype)
        into[row, place] = torch.where(is_any, values, into[row, place])
