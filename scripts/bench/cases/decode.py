"""Decode attention on stored formats: times, bytes and errors against stock attention on joined keys. Writes JSON.

Usage on a GPU: python scripts/bench/run.py decode [--tune] [--seconds 600] [--out docs/benchmarks/decode.json]
`--tune` first times other tile configs and writes kernels/triton/dba_decode_table.json, a shape at a time.
`--size tiny` runs the reference on a CPU, to see that the script works.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from cases import decode_cases as cases
from cases.decode_times import capture
from plots import draw_decode
from record import Record, machine_facts
from timing import device_seconds, host_seconds, interleave, spread, wall_seconds

from caramba import kernels
from caramba.ops.dba_decode import dba_decode
from caramba.runs.files import write_whole

COLD_BYTES = 3 * 60_000_000
FEW_BYTES = 2_000_000_000  # up to which a graph holds STEPS steps, and there are two stores at least
STEPS = 12
"""Steps of a graph, in turn on all stores: a replay costs the host some 10 us before its first kernel, which a decode
step of a model pays once for all its layers."""
COMPILING = 0.45  # of the time, when tuning
BEST = 4  # tile configs that later shapes try
CUDA = torch.device("cuda")
TABLE = Path("kernels/triton/dba_decode_table.json")
SIZES = {
    # The middle one first: what reads a tile well there is what the others are tuned among.
    "full": [
        *((8, 32768), (1, 131072), (64, 4096), (64, 32768), (1, 32768)),
        *((8, 4096), (8, 131072), (1, 4096), (64, 131072)),
    ],
    "tiny": [(1, 256), (2, 192)],
}


def calls(
    layout: cases.Layout, stores: list[cases.Store], q: Any, tokens: int, config: Any = None
) -> Callable[[], Any]:
    """Return one step on each store in turn: through the op, or the launcher with a given config."""
    device = q[0].device
    seqlens = torch.full((q[0].shape[0],), tokens, dtype=torch.int32, device=device)
    is_packed = any(stream.scales is not None for stream in stores[0].streams)
    n_packed = (
        torch.tensor([tokens - cases.TAIL // 2], dtype=torch.int32, device=device) if is_packed else None
    )

    def through_op() -> Any:
        for store in stores:
            streams = [*store.streams, None][:3]
            found = dba_decode(*q, *streams, seqlens, n_packed=n_packed, max_seqlen=tokens)
        return found

    def through_launcher() -> Any:
        from caramba.kernels.triton.dba_decode import launch

        for store in stores:
            kinds = [stream.kind for stream in store.streams]
            parts = [*(stream.tensors for stream in store.streams), []][:3]
            found = launch(config, *q, kinds, *parts, seqlens, n_packed, [], 0)
        return found

    return through_op if config is None else through_launcher


def tune(
    layout: cases.Layout,
    stores: list[cases.Store],
    q: Any,
    tokens: int,
    turns: int,
    good: dict[Any, None],
    options: Any,
) -> str:
    """Time tile configs of a shape, put the best in the table, and print it.

    First every tile config with two programs a processor, then the best three with other counts of splits, and
    the best of all with a join that begins late. `good` are the configs that were compiled, all where it is empty; it
    becomes those that were best here, which later shapes of this layout and format try alone.
    """
    from caramba.kernels.cuda import nvrtc
    from caramba.kernels.triton import dba_decode_table as table
    from caramba.kernels.triton.dba_decode_plan import decode_shape

    kinds = [stream.kind for stream in stores[0].streams]
    parts = [*(stream.tensors for stream in stores[0].streams), []][:3]
    shape = decode_shape(*q, kinds, *parts, tokens)
    by_reading: dict[Any, list[Any]] = {}
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    ways = select_configs(table.candidates(shape, processors, in_cuda=nvrtc.version() is not None), options)
    for config in ways:
        if config.early_join:
            by_reading.setdefault(config.reading, []).append(config)
    tried: dict[Any, float] = {}

    def attempt(configs: list[Any]) -> None:
        for config in configs:
            if config in tried:
                continue
            try:
                replay = capture(calls(layout, stores, q, tokens, config), turns)
            except (
                Exception
            ) as refused:  # more shared memory or registers than there are: printed, and the next one
                print(
                    f"  {config}: {type(refused).__name__}: {str(refused).splitlines()[0][:90]}", flush=True
                )
                continue
            tried[config] = (
                statistics.median(
                    interleave({"": lambda replay=replay: device_seconds(replay, CUDA)}, repeats=5)[""]
                )
                * 1e6
                / (turns * len(stores))
            )

    readings = [reading for reading in by_reading if not good or reading in good]
    attempt([by_reading[reading][min(1, len(by_reading[reading]) - 1)] for reading in readings])
    for reading in list(dict.fromkeys(config.reading for config in sorted(tried, key=tried.__getitem__)))[:3]:
        attempt(by_reading[reading])
    present = table.measured().get(shape.key)
    if tried and present is not None:
        attempt([present])
    best = sorted(tried, key=tried.__getitem__)
    if not best:
        return "no config ran: the rule's choice stays"
    attempt([late for late in (replace(way, early_join=False) for way in best[:2]) if late in ways])
    best = sorted(tried, key=tried.__getitem__)
    readings = list(dict.fromkeys(config.reading for config in best))[:BEST]
    good.clear()
    good.update(dict.fromkeys(readings))
    table.load_tuned({shape.key: asdict(best[0])})
    write_whole(options.table, table.written({}))
    forget_plans()
    first = table.rule(shape, processors)
    gain = f", {tried[first] / tried[best[0]]:.2f}x the rule's choice" if first in tried else ""
    return f"tuned over {len(tried)}: {best[0]}{gain}"


def select_configs(ways: list[Any], options: Any) -> list[Any]:
    """Return the configs to time: those in CUDA C++ if there are any, which were the faster ones so far."""
    in_cuda = [way for way in ways if way.in_cuda and way.variant in options.variants]
    rest = [way for way in ways if not way.in_cuda]
    return [*in_cuda, *rest] if options.triton or not in_cuda else in_cuda


def forget_plans() -> None:
    from caramba.kernels.triton import dba_decode

    dba_decode.forget_plans()


def warm(job: tuple[str, str, Any]) -> str:
    """Compile one config of one layout and format into Triton's cache, in a process of its own."""
    name, form, config = job
    layout = cases.select_layouts([name])[0]
    try:
        stores = [cases.make(layout, form, 2, 4096, "cuda")]
        q = cases.queries(layout, 2, "cuda", torch.bfloat16)
        calls(layout, stores, q, 4096, config)()
        torch.cuda.synchronize()
    except Exception as refused:
        return f"{layout.name} {form} {config}: {type(refused).__name__}: {str(refused)[:90]}"
    return ""


def warm_all(options: Any, seconds: float) -> set[tuple[str, str, Any]]:
    """Compile on all cores what tuning will time, the likeliest first; return what was done in the time.

    What has begun then is waited for.
    """
    from caramba.kernels.cuda import nvrtc
    from caramba.kernels.triton.dba_decode_table import DecodeShape, candidates
    from caramba.kernels.triton.launch import arch

    kind, in_cuda = arch(torch.device("cuda")), nvrtc.version() is not None
    ranked: list[tuple[int, tuple[str, str, Any]]] = []
    for layout in cases.select_layouts(options.layouts):
        for form in options.formats:
            kinds = layout.kinds(form)
            rows = layout.heads // layout.kv_heads
            shape = DecodeShape(kind, kinds, layout.dims, rows, 8 * layout.kv_heads, 32768)
            ways = select_configs(candidates(shape, 132, in_cuda), options)
            readings = dict.fromkeys(way.reading for way in ways)
            # The count of splits is not compiled in, but for one.
            ranked += [
                (rank, (layout.name, form, replace(way, n_splits=2))) for rank, way in enumerate(readings)
            ]
    jobs = [job for _, job in sorted(ranked, key=lambda item: item[0])]
    n_workers = max(1, min(24, (os.cpu_count() or 2) - 4))
    with ProcessPoolExecutor(n_workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(warm, job): job for job in jobs}
        wait(futures, timeout=seconds)
        pool.shutdown(cancel_futures=True)
    found = {job: future.result() for future, job in futures.items() if not future.cancelled()}
    refused = [said for said in found.values() if said]
    compiled = {(name, form, way.reading) for (name, form, way), said in found.items() if not said}
    print(f"compiled {len(compiled)} configs of {len(jobs)}", *refused, sep="\n  ", flush=True)
    return compiled


def measure(
    layout: cases.Layout, form: str, batch: int, tokens: int, device: str, options: Any, good: dict[Any, None]
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
    if on_gpu and options.tune:
        said = tune(layout, stores, q, tokens, turns, good, options)
        print(f"  {said}", flush=True)
    step = calls(layout, stores, q, tokens)
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
    parser.add_argument("--triton", action="store_true", help="tune Triton's configs too if there are others")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--layouts", nargs="*", help="names or their beginnings")
    parser.add_argument("--formats", nargs="*", default=list(cases.FORMATS))
    parser.add_argument(
        "--variants", type=int, nargs="*", default=[0, 1, 2, 3], help="of kernels in CUDA C++"
    )
    parser.add_argument("--table", type=Path, default=TABLE, help="where --tune puts its choices")


def run(options: argparse.Namespace, record: Record) -> int | None:
    began = time.monotonic()
    device = "cpu" if options.size == "tiny" else "cuda"
    machine = machine_facts(torch.device(device))
    roof = None
    compiled: set[tuple[str, str, Any]] = set()
    if device == "cuda":
        from cases.read_bandwidth import read_bandwidth

        chosen = kernels.load(device, "auto")
        if chosen["dba_decode"] != "triton":
            raise SystemExit("decode: the Triton kernel did not load; see the message above")
        roof = read_bandwidth()
        print(f"read roof {roof / 1e12:.2f} TB/s", flush=True)
        if options.tune:
            compiled = warm_all(options, options.seconds * COMPILING)
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
    good: dict[tuple[str, str], dict[Any, None]] = {}
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
            kept = good.setdefault((layout.name, form), {})
            kept |= {
                way: None for of, kind, way in compiled if not kept and (of, kind) == (layout.name, form)
            }
            row = measure(layout, form, batch, tokens, device, options, kept)
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
