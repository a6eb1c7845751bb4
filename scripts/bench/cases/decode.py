"""Decode attention on stored formats: times, bytes and errors against stock attention on joined keys. Writes JSON.

Usage on a GPU: python scripts/bench/run.py decode [--tune] [--seconds 600] [--out docs/benchmarks/decode.json]
`--tune` first writes what `caramba tune` finds to kernels/triton/dba_decode_table.json.
`--size tiny` runs the reference on a CPU, to see that the script works.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from plots import draw_decode
from record import Record, Row
from registry import check_names
from timing import capture, device_seconds, host_seconds, interleave, read_rate, spread, wall_seconds
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from caramba import kernels
from caramba.cache.view import zero_keys
from caramba.lower.tune.decode import tune_decode
from caramba.ops.dba_decode import ZEROS, StoredStream, dba_decode
from caramba.ops.formats import STORED, dequantize
from caramba.runs.files import write_whole

COLD_BYTES = 3 * 60_000_000
FEW_BYTES = 2_000_000_000  # up to which a graph holds STEPS steps, and there are two stores at least
STEPS = 12
"""Steps of a graph, in turn on all stores: a replay costs the host some 10 us before its first kernel, which a decode
step of a model pays once for all its layers."""
TUNING = 0.7  # of the time
CUDA = torch.device("cuda")
TABLE = Path("kernels/triton/dba_decode_table.json")
SIZES = {
    "full": "8x32768 1x131072 64x4096 64x32768 1x32768 8x4096 8x131072 1x4096 64x131072",
    "tiny": "1x256 2x192",
}
"""Batch and tokens."""
TAIL = 128
PEERS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
FORMATS = {
    "bf16": ("bf16", "bf16", "bf16"),
    "q8_0": ("q8_0", "q8_0", "q8_0"),
    "q4_0": ("q4_0", "q4_0", "q4_0"),
    "nf4": ("nf4", "nf4", "nf4"),
    "mixed": ("q4_0", "q8_0", "q4_0"),
}


@dataclass(frozen=True)
class Layout:
    """Heads and widths of a layer; `latent` has one key/value head and no values of its own.

    `one_part`: the keys have the first width, followed by zeros, which take no memory.
    """

    name: str
    heads: int
    kv_heads: int
    dims: tuple[int, int, int]
    one_part: bool = False

    @property
    def latent(self) -> bool:
        return self.kv_heads == 1

    @property
    def widths(self) -> tuple[int, ...]:
        return self.dims[:2] if self.latent else self.dims

    def kinds(self, form: str) -> tuple[str, ...]:
        """Formats of the streams."""
        sem, geo, v = FORMATS[form]
        return (sem, ZEROS, v) if self.one_part else (sem, geo, v)[: len(self.widths)]

    def bytes_per_token(self, form: str) -> float:
        """Bytes that a step has to read for a token: codes and scales without padding."""
        each = (
            2 * width if kind == "bf16" else width * (block.code_bytes + block.scale_bytes) / block.elements
            for kind, width in zip(self.kinds(form), self.widths, strict=True)
            if kind != ZEROS
            for block in [STORED[kind].block if kind != "bf16" else None]
        )
        return self.kv_heads * sum(each)


LAYOUTS = (
    Layout("latent 128+64", 32, 1, (128, 64, 128)),
    Layout("latent 128+256", 32, 1, (128, 256, 128)),
    Layout("per head 8 x (16+32, 64)", 32, 8, (16, 32, 64)),
)
ON_REQUEST = (
    Layout("one part 8 x (64, 64)", 32, 8, (64, 16, 64), one_part=True),
    Layout("one part 8 x (128, 128)", 32, 8, (128, 16, 128), one_part=True),
)
"""Quantised keys of plain attention, which run only by name."""


def select_layouts(beginnings: Sequence[str] | None) -> list[Layout]:
    """Return the layouts whose names begin so, those of the table without any."""
    if not beginnings:
        return list(LAYOUTS)
    return [layout for layout in (*LAYOUTS, *ON_REQUEST) if layout.name.startswith(tuple(beginnings))]


@dataclass
class Store:
    """One cache full of `tokens` tokens: what the op reads, its float64 twin of sequence 0, and the keys joined."""

    streams: list[StoredStream]
    joined: Tensor | None = None

    @property
    def padded_bytes(self) -> int:
        """Bytes of everything allocated, tails aside."""
        parts = [part for stream in self.streams for part in stream.tensors[:2]]
        return sum(part.nbytes for part in parts if part.stride(2))


def make_store(layout: Layout, form: str, batch: int, tokens: int, device: str) -> Store:
    """Draw a store; codes and scales are random themselves, so that nothing large passes through float32."""
    kv = layout.kv_heads
    if form == "bf16" and layout.latent:
        joined = _normal((batch, 1, tokens, sum(layout.widths)), device)
        c, k_geo = joined.split(layout.widths, dim=-1)
        return Store([StoredStream("bf16", c), StoredStream("bf16", k_geo)], joined)
    streams = []
    for kind, width in zip(layout.kinds(form), layout.widths, strict=True):
        if kind == ZEROS:
            streams.append(zero_keys(streams[0], width))
            continue
        if kind == "bf16":
            streams.append(StoredStream(kind, _normal((batch, kv, tokens, width), device)))
            continue
        stored = STORED[kind]
        lanes = (batch, stored.block.n_blocks(kv * width), tokens)
        codes = torch.randint(0, 256, (*lanes, stored.code_width), dtype=torch.uint8, device=device)
        codes = codes.view(stored.code_dtype)
        step = {"q8_0": 1 / 74, "q4_0": 1 / 4.6, "nf4": 1.7}[kind]  # numbers of a deviation near 1
        scales = torch.rand((*lanes, 1), device=device).mul_(step).add_(step / 2).to(stored.scale_dtype)
        tail = _normal((batch, kv, TAIL, width), device)
        streams.append(StoredStream(kind, codes, scales, tail))
    return Store(streams)


def _normal(shape: tuple[int, ...], device: str) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def queries(layout: Layout, batch: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Draw queries whose scores have a deviation near 1."""
    scale = sum(layout.dims[:2]) ** -0.5
    sem, geo = (torch.randn(batch, layout.heads, 1, d, device=device) * scale for d in layout.dims[:2])
    return sem.to(dtype), geo.to(dtype)


def relative_error(
    layout: Layout, store: Store, q: tuple[Tensor, Tensor], out: Tensor, tokens: int, n_packed: int
) -> float:
    """Return the relative error of sequence 0, first group of heads, against float64."""
    numbers = []
    for stream in store.streams:
        if stream.scales is None or stream.tail is None:
            numbers.append(stream.values[0, 0, :tokens].double())
            continue
        width = stream.tail.shape[-1]
        whole = layout.kv_heads * width
        rows = stream.values[0, :, :n_packed].transpose(0, 1), stream.scales[0, :, :n_packed, 0].T
        head = dequantize(*rows, stream.kind, whole, torch.float64)[:, :width]
        numbers.append(torch.cat((head, stream.tail[0, 0, : tokens - n_packed].double())))
    group = layout.heads // layout.kv_heads
    sem, geo = (x[0, :group, 0].double() for x in q)
    weights = (sem @ numbers[0].T + geo @ numbers[1].T).softmax(-1)
    wanted = weights @ numbers[0 if layout.latent else 2]
    return float((out[0, :group, 0].double() - wanted).norm() / wanted.norm())


def stock_attention(layout: Layout, stores: list[Store], q: tuple[Tensor, Tensor]) -> dict[str, Callable[[], Any]]:
    """Return stock attention on concatenated keys, by backend and form, each over all stores.

    `grouped`: the heads of a group are queries of one head, as the layer has it; `gqa`: enable_gqa. The latent's
    value is the whole key (a backend then has one width); per head also with keys padded to the values' width.
    """
    joined_q = torch.cat(q, dim=-1)
    batch, heads, _, width = joined_q.shape
    sets = []
    if layout.latent:
        sets.append(("", joined_q, [(s.joined, s.joined) for s in stores]))
    else:
        keys = [torch.cat([stream.values for stream in s.streams[:2]], dim=-1) for s in stores]
        values = [s.streams[2].values for s in stores]
        pad = layout.dims[2] - width
        sets.append(("", joined_q, list(zip(keys, values, strict=True))))
        padded = [F.pad(k, (0, pad)) for k in keys]
        sets.append((" padded", F.pad(joined_q, (0, pad)), list(zip(padded, values, strict=True))))
    found: dict[str, Callable[[], Any]] = {}
    for said, query, pairs in sets:
        grouped = query.reshape(batch, layout.kv_heads, heads // layout.kv_heads, query.shape[-1])
        for backend in PEERS:
            for form, x, gqa in (("grouped", grouped, False), ("gqa", query, True)):
                name = f"{backend.name.removesuffix('_ATTENTION')} {form}{said}"
                found[name] = _peer(backend, x, pairs, gqa)
    return found


def _peer(backend: SDPBackend, query: Tensor, pairs: list[tuple[Any, Any]], gqa: bool) -> Callable[[], Any]:
    def call() -> None:
        with sdpa_kernel([backend]):
            for k, v in pairs:
                F.scaled_dot_product_attention(query, k, v, scale=1.0, enable_gqa=gqa)

    return call


def calls(stores: list[Store], q: Any, tokens: int) -> Callable[[], Any]:
    """Return one step on each store in turn."""
    seqlens = torch.full((q[0].shape[0],), tokens, dtype=torch.int32, device=q[0].device)
    is_packed = any(stream.scales is not None for stream in stores[0].streams)
    n_packed = seqlens[:1] - TAIL // 2 if is_packed else None

    def step() -> Any:
        for store in stores:
            streams = [*store.streams, None][:3]
            found = dba_decode(*q, *streams, seqlens, n_packed=n_packed, max_seqlen=tokens)
        return found

    return step


def tune(device: torch.device, seconds: float) -> None:
    """Put what `caramba tune` finds here in the kernel's table."""
    from caramba.kernels.triton import dba_decode as launcher
    from caramba.kernels.triton import dba_decode_table

    dba_decode_table.load_tuned(tune_decode(device, seconds))
    write_whole(TABLE, dba_decode_table.written({}))
    launcher.forget_plans()


def measure(
    layout: Layout, form: str, batch: int, tokens: int, roof: float | None, options: argparse.Namespace
) -> list[Row]:
    """Return the row of one layout and format at one size.

    Raises:
        torch.OutOfMemoryError: The stores do not fit.
    """
    device = "cuda" if roof else "cpu"
    useful = batch * tokens * layout.bytes_per_token(form)
    need = useful * (3 if form == "bf16" else 1.3)  # peers hold the keys twice more
    if roof and need > 0.7 * torch.cuda.mem_get_info()[0]:
        raise torch.OutOfMemoryError(f"{need / 1e9:.0f} GB do not fit")
    n_stores = math.ceil(COLD_BYTES / useful) + 1 if roof and useful < FEW_BYTES else 1
    turns = math.ceil(STEPS / n_stores) if useful < FEW_BYTES else 1
    stores = [make_store(layout, form, batch, tokens, device) for _ in range(n_stores)]
    q = queries(layout, batch, device, torch.bfloat16)
    step = calls(stores, q, tokens)
    out, _ = step()
    row: Row = {"layout": layout.name, "format": form, "batch": batch, "tokens": tokens}
    row |= {"useful_bytes": useful, "padded_bytes": stores[0].padded_bytes}
    row["relative_error"] = relative_error(layout, stores[-1], q, out, tokens, tokens - TAIL // 2)
    if roof is None:
        return [row | spread([wall_seconds(step, torch.device(device))], "us")]
    row["host_us"] = 1e6 * host_seconds(step, CUDA, max(1, 20 // n_stores), 5) / n_stores
    replays, refused = {"caramba": capture(step, turns)}, {}
    for name, call in (stock_attention(layout, stores, q) if form == "bf16" else {}).items():
        try:
            replays[name] = capture(call, turns)
        except RuntimeError as why:
            refused[name] = str(why).splitlines()[0]
    n_steps = turns * n_stores
    sides = {name: lambda replay=replay: device_seconds(replay, CUDA) / n_steps for name, replay in replays.items()}
    times = interleave(sides, repeats=options.repeats)
    row |= {"steps_of_a_graph": n_steps} | spread(times.pop("caramba"), "us")
    row["roof_share"] = useful / row["median_us"] * 1e6 / roof
    peers = {name: spread(found, "us") for name, found in times.items()}
    if peers:
        row["best_peer"] = min(peers, key=lambda name: peers[name]["median_us"])
        row["over_peer"] = peers[row["best_peer"]]["median_us"] / row["median_us"]
    return [row | {"peers": peers, "refused": refused}]


OPTIONS = "--size=full|tiny --tune --seconds=540.0 --repeats=25 --layouts=* --formats=*"
SMOKE_OPTIONS = "--size tiny --device cpu --formats bf16 q8_0"


def run(options: argparse.Namespace, record: Record) -> None:
    roof = None
    check_names("--formats", options.formats, FORMATS)
    if options.size == "tiny":
        record.device = torch.device("cpu")
    elif kernels.load(record.device, "auto")["dba_decode"] != "triton":
        raise SystemExit("decode: the Triton kernel did not load; see the message above")
    else:
        roof = read_rate(record.device)
        if options.tune:
            tune(record.device, options.seconds * TUNING)
    plot = None if record.out is None else record.out.with_suffix(".png").name
    record.start(read_roof_bytes_per_s=roof, plot=plot)
    # Shapes outermost: what there is no time for is sizes, of which others are read alike, and no format or layout.
    sizes = [tuple(map(int, text.split("x"))) for text in SIZES[options.size].split()]
    layouts, formats = select_layouts(options.layouts), options.formats or FORMATS
    every = [
        (
            f"{layout.name} {form} {at[0]} x {at[1]}",
            functools.partial(measure, layout, form, *at, roof, options),
        )
        for at, layout, form in itertools.product(sizes, layouts, formats)
    ]
    record.measure(every, options.seconds)
    record.write_plot(draw_decode(record.data))
