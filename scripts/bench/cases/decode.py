"""Decode attention on stored formats: times, bytes and errors against stock attention on joined keys. Writes JSON.

Usage on a GPU: python scripts/bench/run.py decode [--tune] [--seconds 600] [--out docs/benchmarks/decode.json]
`--tune` first writes what `caramba tune` finds to kernels/triton/dba_decode_table.json.
`--size tiny` runs the reference on a CPU, to see that the script works.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases import decode_cases as cases
from plots import draw_decode
from record import Record, machine_facts
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
    "full": [
        *((8, 32768), (1, 131072), (64, 4096), (64, 32768), (1, 32768)),
        *((8, 4096), (8, 131072), (1, 4096), (64, 131072)),
    ],
    "tiny": [(1, 256), (2, 192)],
}


def calls(stores: list[cases.Store], q: Any, tokens: int) -> Callable[[], Any]:
    """Return one step on each store in turn."""
    device = q[0].device
    seqlens = torch.full((q[0].shape[0],), tokens, dtype=torch.int32, device=device)
    is_packed = any(stream.scales is not None for stream in stores[0].streams)
    n_packed = (
        torch.tensor([tokens - cases.TAIL // 2], dtype=torch.int32, device=device) if is_packed else None
    )

    def step() -> Any:
        for store in stores:
            streams = [*store.streams, None][:3]
            found = dba_decode(*q, *streams, seqlens, n_packed=n_packed, max_seqlen=tokens)
        return found

    return step


def tune(device: torch.device, seconds: float, file: Path) -> None:
    """Put what `caramba tune` finds here in the kernel's table."""
    from caramba.kernels.triton import dba_decode, dba_decode_table

    dba_decode_table.load_tuned(tune_decode(device, seconds))
    write_whole(file, dba_decode_table.written({}))
    dba_decode.forget_plans()


def measure(
    layout: cases.Layout, form: str, batch: int, tokens: int, device: str, options: Any
) -> dict[str, Any]:
    on_gpu = device == "cuda"
    useful = batch * tokens * layout.bytes_per_token(form)
    n_stores = math.ceil(COLD_BYTES / useful) + 1 if on_gpu and useful < FEW_BYTES else 1
    turns = math.ceil(STEPS / n_stores) if useful < FEW_BYTES else 1
    stores = [cases.make(layout, form, batch, tokens, device) for _ in range(n_stores)]
    q = cases.queries(layout, batch, device, torch.bfloat16)
    row: dict[str, Any] = {
        "layout": layout.name,
        "format": form,
        "batch": batch,
        "tokens": tokens,
        "useful_bytes": useful,
        "padded_bytes": stores[0].padded_bytes,
    }
    if on_gpu:
        row["steps_of_a_graph"] = n_stores * turns
    step = calls(stores, q, tokens)
    out, _ = step()
    row["relative_error"] = cases.error(layout, stores[-1], q, out, tokens, tokens - cases.TAIL // 2)
    refused: dict[str, str] = {}
    if not on_gpu:
        return row | spread([wall_seconds(step, torch.device(device))], "us")
    row["host_us"] = 1e6 * host_seconds(step, CUDA, max(1, 20 // n_stores), 5) / n_stores
    replays = {"caramba": capture(step, turns)}
    if form == "bf16":
        for name, call in cases.peers(layout, stores, q).items():
            try:
                replays[name] = capture(call, turns)
            except RuntimeError as why:
                refused[name] = str(why).splitlines()[0]
    n_steps = turns * n_stores
    sides = {
        name: lambda replay=replay: device_seconds(replay, CUDA) / n_steps for name, replay in replays.items()
    }
    times = interleave(sides, repeats=options.repeats)
    row |= spread(times.pop("caramba"), "us")
    return row | {"peers": {name: spread(found, "us") for name, found in times.items()}, "refused": refused}


SMOKE_OPTIONS = ("--size", "tiny", "--formats", "bf16", "q8_0")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--layouts", nargs="*", help="names or their beginnings")
    parser.add_argument("--formats", nargs="*", default=list(cases.FORMATS))
    parser.add_argument("--table", type=Path, default=TABLE, help="where --tune puts its choices")


def run(options: argparse.Namespace, record: Record) -> int | None:
    began = time.monotonic()
    device = "cpu" if options.size == "tiny" else "cuda"
    machine = machine_facts(torch.device(device))
    roof = None
    if device == "cuda":
        chosen = kernels.load(device, "auto")
        if chosen["dba_decode"] != "triton":
            raise SystemExit("decode: the Triton kernel did not load; see the message above")
        roof = read_rate(torch.device(device))
        print(f"read roof {roof / 1e12:.2f} TB/s", flush=True)
        if options.tune:
            tune(torch.device(device), options.seconds * TUNING, options.table)
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    data = {
        **record.head(machine),
        "read_roof_bytes_per_s": roof,
        "plot": options.out.with_suffix(".png").name,
        "rows": rows,
        "left_out": left_out,
    }
    layouts = cases.select_layouts(options.layouts)
    # Shapes outermost: what there is no time for is sizes, of which others are read alike, and no format or layout.
    for batch, tokens in SIZES[options.size]:
        for layout, form in ((layout, form) for layout in layouts for form in options.formats):
            name = f"{layout.name} {form} {batch} x {tokens}"
            # Peers hold the keys twice more.
            need = batch * tokens * layout.bytes_per_token(form) * (3 if form == "bf16" else 1.3)
            if time.monotonic() - began > options.seconds:
                left_out.append(f"{name}: no time left")
                continue
            if device == "cuda" and need > 0.7 * torch.cuda.mem_get_info()[0]:
                left_out.append(f"{name}: {need / 1e9:.0f} GB do not fit")
                continue
            row = measure(layout, form, batch, tokens, device, options)
            rows.append(row)
            print(f"{name}: {told(row, roof)}", flush=True)
            if device == "cuda":
                torch.cuda.empty_cache()
            record.write_data(data)
    record.write_data(data)
    draw_decode(data, options.out.with_suffix(".png"))


def told(row: dict[str, Any], roof: float | None) -> str:
    """Put shares of the roof and of the best peer into a row, and say it in a line."""
    text = f"{row['median_us']:.1f} us, error {row['relative_error']:.1e}"
    if roof is None:
        return text
    row["roof_share"] = row["useful_bytes"] / row["median_us"] * 1e6 / roof
    text += f", {100 * row['roof_share']:.0f}% of the roof, host {row['host_us']:.0f} us"
    if row["peers"]:
        peer, time_of = min(row["peers"].items(), key=lambda item: item[1]["median_us"])
        row["best_peer"], row["over_peer"] = peer, time_of["median_us"] / row["median_us"]
        text += f", {row['over_peer']:.2f}x {peer}"
    return text
