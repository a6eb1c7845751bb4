"""Decode attention on stored formats: times, bytes and errors beside stock attention on concatenated keys. Writes JSON.

Usage on a GPU: python scripts/bench/decode.py [--tune] [--seconds 600] [--out docs/benchmarks/decode.json]
`--tune` first times other ways to cut the work and writes kernels/triton/dba_decode_table.json, a shape at a time.
`--size tiny` runs the reference on a CPU, to see that the script works.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import decode_cases as cases
import sections_decode
import torch

from caramba import kernels
from caramba.ops import dba_decode
from caramba.runs.files import write_json, write_whole

COLD_BYTES = 3 * 60_000_000
TABLE = Path("kernels/triton/dba_decode_table.json")
SIZES = {
    # The middle one first: what reads a tile well there is what the others are tuned among.
    "full": [
        (8, 32768),
        *((b, s) for b in (1, 8, 64) for s in (4096, 32768, 131072) if (b, s) != (8, 32768)),
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


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return the replay of a graph of the call."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def interleaved(replays: dict[str, Callable[[], Any]], n_steps: int, repeats: int) -> dict[str, list[float]]:
    """Return microseconds a step of each, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(repeats):
        for name, replay in replays.items():
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            replay()
            ended.record()
            torch.cuda.synchronize()
            times[name].append(began.elapsed_time(ended) * 1e3 / n_steps)
    return times


def spread(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "median_us": statistics.median(ordered),
        "p20_us": ordered[len(ordered) // 5],
        "p80_us": ordered[-1 - len(ordered) // 5],
    }


def host_us(step: Callable[[], Any], n_steps: int) -> float:
    """Return the least time that the host spends on an eager call, which returns before its kernels have run."""
    best = math.inf
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(max(1, 20 // n_steps)):
            step()
        best = min(best, (time.perf_counter() - began) / (max(1, 20 // n_steps) * n_steps))
    torch.cuda.synchronize()
    return best * 1e6


def tune(layout: cases.Layout, stores: list[cases.Store], q: Any, tokens: int, good: dict[Any, None]) -> str:
    """Time the candidates of a shape, put the best in the table, and say it.

    `good` are the ways to read a tile that won at earlier shapes of this layout and format: later ones try those alone.
    """
    from caramba.kernels.triton import dba_decode_table as table
    from caramba.kernels.triton.dba_decode import decode_shape

    kinds = [stream.kind for stream in stores[0].streams]
    parts = [*(stream.tensors for stream in stores[0].streams), []][:3]
    shape = decode_shape(*q, kinds, *parts, tokens)
    n_processors = torch.cuda.get_device_properties(0).multi_processor_count
    tried: dict[Any, float] = {}
    for config in table.candidates(shape, n_processors):
        reading = replace(config, n_splits=1)
        if len(good) >= 3 and reading not in good:
            continue
        try:
            replay = captured(calls(layout, stores, q, tokens, config))
        except Exception as refused:  # more shared memory or registers than there are: told, and the next one
            print(f"  {config}: {type(refused).__name__}: {str(refused).splitlines()[0][:90]}", flush=True)
            continue
        tried[config] = statistics.median(interleaved({"": replay}, len(stores), 5)[""])
    best = sorted(tried, key=lambda config: tried[config])[:3]
    good.update({replace(config, n_splits=1): None for config in best})
    write_whole(TABLE, table.written({shape.key: best[0]}))
    table.measured.cache_clear()
    return f"tuned over {len(tried)}: {best[0]}"


def warm(job: tuple[int, str, Any]) -> str:
    """Compile one way of one layout and format into Triton's cache, in a process of its own."""
    index, form, config = job
    layout = cases.LAYOUTS[index]
    try:
        stores = [cases.make(layout, form, 2, 4096, "cuda")]
        q = cases.queries(layout, 2, "cuda", torch.bfloat16)
        calls(layout, stores, q, 4096, config)()
        torch.cuda.synchronize()
    except Exception as refused:
        return f"{layout.name} {form} {config}: {type(refused).__name__}: {str(refused)[:90]}"
    return ""


def warm_all(options: Any) -> None:
    """Compile what tuning will time, on all cores."""
    from caramba.kernels.triton.dba_decode_table import DecodeShape, candidates

    jobs: dict[tuple[int, str, Any], None] = {}
    for index, layout in enumerate(cases.LAYOUTS):
        if options.layouts and not layout.name.startswith(tuple(options.layouts)):
            continue
        for form in options.formats:
            kinds = cases.FORMATS[form][: len(layout.widths)]
            rows = layout.heads // layout.kv_heads
            shape = DecodeShape("", kinds, layout.dims, rows, 8 * layout.kv_heads, 32768)
            for config in candidates(shape, 132):
                # The count of splits is not compiled in, but for one.
                jobs[index, form, replace(config, n_splits=2)] = None
    n_workers = max(1, min(12, (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(n_workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        refused = [said for said in pool.map(warm, jobs) if said]
    print(f"compiled {len(jobs) - len(refused)} ways of {len(jobs)}", *refused, sep="\n  ", flush=True)


def measure(
    layout: cases.Layout, form: str, batch: int, tokens: int, device: str, options: Any, good: dict[Any, None]
) -> dict[str, Any]:
    on_gpu = device == "cuda"
    useful = batch * tokens * layout.bytes_per_token(form)
    n_stores = math.ceil(COLD_BYTES / useful) + 1 if on_gpu and useful < COLD_BYTES else 1
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
    if on_gpu and options.tune:
        print(f"  {tune(layout, stores, q, tokens, good)}", flush=True)
    step = calls(layout, stores, q, tokens)
    out, _ = step()
    row["relative_error"] = cases.error(layout, stores[-1], q, out, tokens, tokens - cases.TAIL // 2)
    refused: dict[str, str] = {}
    if not on_gpu:
        began = time.perf_counter()
        step()
        return row | spread([(time.perf_counter() - began) * 1e6])
    row["host_us"] = host_us(step, n_stores)
    replays = {"caramba": captured(step)}
    if form == "bf16":
        for name, call in cases.peers(layout, stores, q).items():
            try:
                replays[name] = captured(call)
            except RuntimeError as why:
                refused[name] = str(why).splitlines()[0]
    times = interleaved(replays, n_stores, options.repeats)
    row |= spread(times.pop("caramba"))
    return row | {"peers": {name: spread(found) for name, found in times.items()}, "refused": refused}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--layouts", nargs="*", help="names or their beginnings")
    parser.add_argument("--formats", nargs="*", default=list(cases.FORMATS))
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/decode.json"))
    options = parser.parse_args()
    began = time.monotonic()
    device = "cpu" if options.size == "tiny" else "cuda"
    machine: dict[str, str] = {"device": device, "torch": torch.__version__}
    roof = None
    if device == "cuda":
        from read_roof import read_roof

        chosen = kernels.load(device, "auto")
        if chosen["dba_decode"] != "triton":
            raise SystemExit("decode: the Triton kernel did not load; see the message above")
        roof = read_roof()
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
        ).stdout.split()
        machine |= {
            "device": torch.cuda.get_device_name(),
            "triton": str(kernels.get_backend_info(device)["triton"]),
            "driver": driver[0] if driver else "unknown",
            "cudnn": str(torch.backends.cudnn.version()),
        }
        print(f"read roof {roof / 1e12:.2f} TB/s", flush=True)
        if options.tune:
            warm_all(options)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    for layout in cases.LAYOUTS:
        if options.layouts and not layout.name.startswith(tuple(options.layouts)):
            continue
        for form in options.formats:
            good: dict[Any, None] = {}
            for batch, tokens in SIZES[options.size]:
                name = f"{layout.name} {form} {batch} x {tokens}"
                # Peers hold the keys twice more.
                need = batch * tokens * layout.bytes_per_token(form) * (3 if form == "bf16" else 1.3)
                if time.monotonic() - began > options.seconds:
                    left_out.append(f"{name}: no time left")
                    continue
                if device == "cuda" and need > 0.7 * torch.cuda.mem_get_info()[0]:
                    left_out.append(f"{name}: {need / 1e9:.0f} GB do not fit")
                    continue
                row = measure(layout, form, batch, tokens, device, options, good)
                rows.append(row)
                text = f"{name}: {row['median_us']:.1f} us, error {row['relative_error']:.1e}"
                if roof is not None:
                    row["roof_share"] = row["useful_bytes"] / row["median_us"] * 1e6 / roof
                    text += f", {100 * row['roof_share']:.0f}% of the roof, host {row['host_us']:.0f} us"
                    if row["peers"]:
                        peer, time_of = min(row["peers"].items(), key=lambda item: item[1]["median_us"])
                        row["best_peer"], row["over_peer"] = peer, time_of["median_us"] / row["median_us"]
                        text += f", {row['over_peer']:.2f}x {peer}"
                    torch.cuda.empty_cache()
                print(text, flush=True)
    data = {
        "benchmark": "decode",
        "made_by": "python scripts/bench/decode.py",
        "commit": commit,
        "machine": machine,
        "read_roof_bytes_per_s": roof,
        "rows": rows,
        "left_out": left_out,
    }
    write_json(options.out, data)
    sections_decode.plot(data, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
