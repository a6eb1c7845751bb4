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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases import decode_cases as cases
from plots import draw_decode
from record import Record, Row
from registry import check_names
from timing import capture, device_seconds, host_seconds, interleave, read_rate, spread, wall_seconds

from caramba import kernels
from caramba.lower.tune.decode import tune_decode
from caramba.ops.dba_decode import dba_decode
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


def calls(stores: list[cases.Store], q: Any, tokens: int) -> Callable[[], Any]:
    """Return one step on each store in turn."""
    seqlens = torch.full((q[0].shape[0],), tokens, dtype=torch.int32, device=q[0].device)
    is_packed = any(stream.scales is not None for stream in stores[0].streams)
    n_packed = seqlens[:1] - cases.TAIL // 2 if is_packed else None

    def step() -> Any:
        for store in stores:
            streams = [*store.streams, None][:3]
            found = dba_decode(*q, *streams, seqlens, n_packed=n_packed, max_seqlen=tokens)
        return found

    return step


def tune(device: torch.device, seconds: float) -> None:
    """Put what `caramba tune` finds here in the kernel's table."""
    from caramba.kernels.triton import dba_decode, dba_decode_table

    dba_decode_table.load_tuned(tune_decode(device, seconds))
    write_whole(TABLE, dba_decode_table.written({}))
    dba_decode.forget_plans()


def measure(
    layout: cases.Layout, form: str, batch: int, tokens: int, roof: float | None, options: argparse.Namespace
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
    stores = [cases.make(layout, form, batch, tokens, device) for _ in range(n_stores)]
    q = cases.queries(layout, batch, device, torch.bfloat16)
    step = calls(stores, q, tokens)
    out, _ = step()
    row: Row = {"layout": layout.name, "format": form, "batch": batch, "tokens": tokens}
    row |= {"useful_bytes": useful, "padded_bytes": stores[0].padded_bytes}
    row["relative_error"] = cases.error(layout, stores[-1], q, out, tokens, tokens - cases.TAIL // 2)
    if roof is None:
        return [row | spread([wall_seconds(step, torch.device(device))], "us")]
    row["host_us"] = 1e6 * host_seconds(step, CUDA, max(1, 20 // n_stores), 5) / n_stores
    replays, refused = {"caramba": capture(step, turns)}, {}
    for name, call in (cases.peers(layout, stores, q) if form == "bf16" else {}).items():
        try:
            replays[name] = capture(call, turns)
        except RuntimeError as why:
            refused[name] = str(why).splitlines()[0]
    n_steps = turns * n_stores
    sides = {
        name: lambda replay=replay: device_seconds(replay, CUDA) / n_steps for name, replay in replays.items()
    }
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
    check_names("--formats", options.formats, cases.FORMATS)
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
    layouts, formats = cases.select_layouts(options.layouts), options.formats or cases.FORMATS
    every = [
        (
            f"{layout.name} {form} {at[0]} x {at[1]}",
            functools.partial(measure, layout, form, *at, roof, options),
        )
        for at, layout, form in itertools.product(sizes, layouts, formats)
    ]
    record.measure(every, options.seconds)
    record.write_plot(draw_decode(record.data))
