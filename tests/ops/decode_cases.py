"""Cases of decode attention for the op's tests: random stores in any mix of formats, and the answer in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from caramba.cache.view import zero_keys
from caramba.ops.dba_decode import ZEROS, StoredStream
from caramba.ops.formats import STORED, dequantize, quantize

NUMBERS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """Shapes and formats of one call; `lengths` are the sequences' stored tokens, `packed` those held as blocks.

    Where the second format is `ZEROS` keys have one part.
    """

    kinds: tuple[str, ...]
    lengths: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int, int] = (16, 32, 64)
    queries: int = 1
    packed: int = 0
    tail: int = 96
    capacity: int = 256
    window: int | None = None
    null: bool = False
    seed: int = 0

    @property
    def latent(self) -> bool:
        return len(self.kinds) == 2


def arguments(case: Case, dtype: torch.dtype, device: str = "cpu") -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of `dba_decode`; what is not in use is NaN, or codes and scales that would give it."""
    generator = torch.Generator().manual_seed(case.seed)
    batch, (heads, kv_heads) = len(case.lengths), case.heads

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    queries = [drawn(batch, heads, case.queries, d) * 1.5 * d**-0.5 for d in case.dims[:2]]
    streams: list[StoredStream | None] = []
    for kind, d in zip(case.kinds, case.dims, strict=False):
        if kind == ZEROS:
            assert streams[0] is not None
            streams.append(zero_keys(streams[0], d))
        else:
            streams.append(stored(kind, drawn(batch, kv_heads, case.capacity, d), case).to_device(device))
    if case.latent:
        streams.append(None)
    options: dict[str, Any] = {"window": case.window}
    if any(kind in STORED for kind in case.kinds):
        options["n_packed"] = torch.tensor([case.packed], dtype=torch.int32, device=device)
    if case.null:
        rows = [drawn(kv_heads, d) for d in case.dims[: len(case.kinds)]]
        options["null"] = tuple(row.to(device, dtype) for row in rows)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    return [*(q.to(device, dtype) for q in queries), *streams, lengths], options


class Stored(StoredStream):
    def to_device(self, device: str) -> StoredStream:
        return StoredStream(self.kind, *(part.to(device) for part in self.tensors))


def stored(kind: str, x: Tensor, case: Case) -> Stored:
    """Store the tokens x [B, K, S, D] in a format, with NaN wherever no token lies."""
    longest = max(case.lengths)
    if kind in NUMBERS:
        values = x.to(NUMBERS[kind])
        for row, length in enumerate(case.lengths):
            values[row, :, length:] = torch.nan
        return Stored(kind, values)
    codes, scales = quantize(x.transpose(1, 2).flatten(2), kind)
    codes, scales = codes.transpose(1, 2).contiguous(), scales.transpose(1, 2)[..., None].contiguous()
    scales[:, :, case.packed :] = torch.nan
    tail = torch.full((*x.shape[:2], case.tail, x.shape[-1]), torch.nan, dtype=torch.bfloat16)
    recent = x[:, :, case.packed : longest]
    tail[:, :, : recent.shape[2]] = recent.to(torch.bfloat16)
    return Stored(kind, codes, scales, tail)


def expected(case: Case, args: list[Any], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return output and log sum exp in float64, one query at a time, from what each stream dequantises to."""
    q = [x.double().cpu() for x in args[:2]]
    streams = [numbers(stream, case, args) for stream in args[2:5] if stream is not None]
    null = [row.double().cpu() for row in options.get("null", ())]
    batch, heads, n_queries, _ = q[0].shape
    width = streams[-1].shape[-1] if not case.latent else case.dims[0]
    out = torch.zeros(batch, heads, n_queries, width, dtype=torch.float64)
    sums = torch.full((batch, heads, n_queries), -torch.inf, dtype=torch.float64)
    for b, h, t in ((b, h, t) for b in range(batch) for h in range(heads) for t in range(n_queries)):
        head = h // (heads // streams[0].shape[1])
        end = max(0, case.lengths[b] - n_queries + t + 1)
        start = 0 if case.window is None else max(0, end - case.window)
        keys = [stream[b, head, start:end] for stream in streams]
        if null:
            keys = [torch.cat((row[head][None], key)) for row, key in zip(null, keys, strict=True)]
        if keys[0].shape[0]:
            scores = keys[0] @ q[0][b, h, t] + keys[1] @ q[1][b, h, t]
            sums[b, h, t] = scores.logsumexp(0)
            out[b, h, t] = scores.softmax(0) @ (keys[0] if case.latent else keys[2])
    return out, sums


def numbers(stream: StoredStream, case: Case, args: list[Any]) -> Tensor:
    """Return a stream's tokens [B, K, S, D] in float64, from its own storage."""
    longest = max(case.lengths)
    if stream.scales is None or stream.tail is None:
        return stream.values[:, :, :longest].double().cpu()
    tail = stream.tail.cpu().double()
    kv_heads, width = tail.shape[1], tail.shape[-1]
    codes = stream.values[:, :, : case.packed].cpu().transpose(1, 2)
    scales = stream.scales[:, :, : case.packed, 0].cpu().transpose(1, 2)
    flat = dequantize(codes, scales, stream.kind, kv_heads * width, torch.float64)
    return torch.cat((flat.unflatten(2, (kv_heads, width)).transpose(1, 2), tail), dim=2)
