"""A training step's trace as a table of its work against the roofs, and the largest gaps between the two.

A trace of torch's profiler with shapes becomes calls: an op with all the kernels it launched. A matrix product or
attention call has FLOPs from the shapes of its op, anything else bytes: each tensor argument once, which is the least
that it moves unless it gathers. What a call takes beyond max(FLOPs / FLOP roof, bytes / byte roof) is its gap, and so
is the time in which the device runs nothing. Calls are summed by name and shapes, and the sums by class. Without a GPU
in the trace the ops themselves are calls, each without those it called.

Usage: python scripts/bench/run.py step_profile TRACE.json[.gz] --steps 3 --params 1236000000 [--out FILE.json]
training.py --parts profile makes a trace of the 8 x 2048 step and calls this.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from record import Record

from caramba.runs.files import write_json, write_whole

DEVICE_CATS = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_CATS = ("cuda_runtime", "cuda_driver")
SIZES = {"double": 8, "long": 8, "int64": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2, "bool": 1}
ATTENTION_FLOPS = 2  # 4 B H T S D, half of it causal, per forward; a backward is 2.5 forwards
FLOAT8 = "float8 products"
CLASSES = (
    ("attention backward", r"(attention|sdpa|flash|fmha).*(backward|bwd)"),
    ("attention", r"attention|sdpa|flash_fwd|fmha"),
    (FLOAT8, r"^aten::_scaled_mm"),
    ("float8 casts", r"^caramba::float8_"),
    ("matrix products", r"^aten::(mm|addmm|bmm|baddbmm|linear|matmul)$|gemm|nvjet|cutlass"),
    ("optimiser", r"adamw?_|lion|list_norms|foreach|multi_tensor"),
    ("compiled elementwise", r"^triton_|^caramba::(rope|swiglu|scale)"),
    ("copies and fills", r"memcpy|memset|aten::(copy_|fill_|zero_|clone|contiguous)"),
)
OTHER = "other"
WRITTEN = {
    "caramba::cross_entropy_rows": (1.0,),
    "caramba::rope_qkv": (1.0,),
    "caramba::rope_qkv_backward": (1.0, 1.0, 1.0),
    "caramba::scale_": (1.0,),
    "caramba::swiglu_packed": (0.5,),
    "caramba::swiglu_packed_backward": (0.0, 1.0),
}
"""What our ops write, in shares of their arguments' bytes: a trace has the arguments alone."""

Call = tuple[str, str, float, float, float, list[str]]


def load_trace(path: Path) -> list[dict[str, Any]]:
    """Return the complete events of a trace file, plain or gzipped."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [event for event in json.loads(raw)["traceEvents"] if event.get("ph") == "X" and "dur" in event]


def device_calls(events: list[dict[str, Any]], on_device: list[dict[str, Any]]) -> Iterator[Call]:
    """The ops that launched the kernels, by a common id or the launch that the op was running.

    A kernel of no op is a call of its own.
    """
    ops = {event["args"]["External id"]: event for event in events if _is_op(event)}
    launched: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    alone: list[dict[str, Any]] = []
    launches = _launching_ops(events)
    for event in on_device:
        args = event.get("args", {})
        key = args.get("External id")
        key = key if key in ops else launches.get(args.get("correlation"))
        (alone if key is None else launched[key]).append(event)
    for key, kernels in launched.items():
        yield _call(
            ops[key], sum(kernel["dur"] for kernel in kernels), [kernel["name"] for kernel in kernels]
        )
    for kernel in alone:
        moved = float(kernel.get("args", {}).get("bytes", 0))
        name = short_name(kernel["name"])
        yield name, _class(name, []), kernel["dur"], 0.0, moved, [name]


def _launching_ops(events: list[dict[str, Any]]) -> dict[Any, Any]:
    """Correlation of a launch -> id of the innermost op that was running in its thread."""
    threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if _is_op(event) or event.get("cat") in LAUNCH_CATS:
            threads[event.get("tid")].append(event)
    found: dict[Any, Any] = {}
    for here in threads.values():
        open_ops: list[dict[str, Any]] = []
        for event in sorted(here, key=lambda event: (event["ts"], -event["dur"])):
            while open_ops and open_ops[-1]["ts"] + open_ops[-1]["dur"] <= event["ts"]:
                open_ops.pop()
            if _is_op(event):
                open_ops.append(event)
            elif open_ops and "correlation" in event.get("args", {}):
                found[event["args"]["correlation"]] = open_ops[-1]["args"]["External id"]
    return found


def cpu_calls(events: list[dict[str, Any]]) -> Iterator[Call]:
    """Every op of a thread with its own time, without that of the ops it called."""
    threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if _is_op(event):
            threads[event.get("tid")].append(event)
    for ops in threads.values():
        inner: dict[int, float] = defaultdict(float)
        open_ops: list[dict[str, Any]] = []
        for op in sorted(ops, key=lambda op: (op["ts"], -op["dur"])):
            while open_ops and open_ops[-1]["ts"] + open_ops[-1]["dur"] <= op["ts"]:
                open_ops.pop()
            if open_ops:
                inner[id(open_ops[-1])] += op["dur"]
            open_ops.append(op)
        for op in ops:
            if op["dur"] - inner[id(op)] > 0:
                yield _call(op, op["dur"] - inner[id(op)], [])


def _is_op(event: dict[str, Any]) -> bool:
    return event.get("cat") == "cpu_op" and "External id" in event.get("args", {})


def _call(op: dict[str, Any], us: float, kernels: list[str]) -> Call:
    dims = op["args"].get("Input Dims", [])
    kind = _class(op["name"], kernels)
    flops = _flops(op["name"], kind, dims)
    moved = _bytes(op["name"], dims, op["args"].get("Input type", []))
    if kind == "float8 casts":
        moved += _written_by_cast(op["name"], dims)
    shapes = " x ".join(str(item) for item in dims if _is_shape(item) and len(item) > 1)
    name = op["name"] if op["name"].startswith("triton_") else f"{op['name']} {shapes}".strip()
    return name, kind, us, flops, moved, [short_name(kernel) for kernel in kernels]


def _class(name: str, kernels: list[str]) -> str:
    for text in (name, *kernels):
        for kind, pattern in CLASSES:
            if re.search(pattern, text, re.IGNORECASE):
                return kind
    return OTHER


def _flops(name: str, kind: str, dims: list[Any]) -> float:
    """FLOPs by the shapes of an op's arguments, 0 where they do not say."""
    shapes = [item for item in dims if _is_shape(item)]
    if kind in ("matrix products", FLOAT8):
        pair = [item for item in shapes if len(item) > 1][-2:] if "add" in name else shapes[:2]
        if len(pair) < 2 or len(pair[1]) < 2 or len(pair[0]) < 2:
            return 0.0
        if pair[0][-1] == pair[1][-2]:
            return 2.0 * math.prod(pair[0]) * pair[1][-1]
        return 2.0 * math.prod(pair[0]) * pair[1][-2] if pair[0][-1] == pair[1][-1] else 0.0
    if kind.startswith("attention"):
        whole = [item for item in shapes if len(item) == 4]
        if len(whole) < 3:
            return 0.0
        after_gradient = 1 if kind == "attention backward" and len(whole) > 3 else 0
        q, k, v = whole[after_gradient : after_gradient + 3]
        forward = ATTENTION_FLOPS * math.prod(q[:3]) * k[2] * (q[3] + v[3]) / 2
        return forward * (1.0 if kind == "attention" else 2.5)
    return 0.0


def _written_by_cast(name: str, dims: list[Any]) -> float:
    """Bytes of a matrix in float8 and its transpose: as many elements as the widest argument has, or half of them."""
    most = max((math.prod(item) for item in dims if _is_shape(item)), default=0)
    return float(most if name.endswith("float8_swiglu") else 2 * most)


def _bytes(op: str, dims: list[Any], types: list[Any]) -> float:
    sizes = []
    for shape, kind in zip(dims, types, strict=False):
        is_tensor = _is_shape(shape) and isinstance(kind, str)
        size = (
            SIZES.get(kind.split("::")[-1].lower(), 1 if "float8" in kind.lower() else 0) if is_tensor else 0
        )
        sizes.append(size * math.prod(shape) if size else 0)
    return float(sum(sizes) + sum(share * of for share, of in zip(WRITTEN.get(op, ()), sizes, strict=False)))


def _is_shape(item: Any) -> bool:
    return isinstance(item, list) and bool(item) and all(isinstance(size, int) for size in item)


def short_name(name: str) -> str:
    return re.sub(r"\s+", " ", re.split(r"[<(]", name.removeprefix("void "))[0]).strip()[:80]


GAPS = 5
H200_FLOPS, H200_BYTES = 790e12, 4.26e12  # dense bf16 products as measured; a copy's read and write
FLOAT8_TIMES = 2  # as many FLOP/s as in bf16, by the peaks of the device
ADAMW_BYTES = 14  # a parameter: weight, two states and gradient of 2 bytes are read, the first three written
IDLE = "device idle"


@dataclass(frozen=True)
class Roofs:
    """FLOP/s of matrix products, bytes/s of memory, and the bytes an optimiser step has to move."""

    flops: float
    bytes: float
    optimizer_bytes: float = 0.0


@dataclass
class Work:
    """Calls of one name and shapes, summed over the traced steps: microseconds, FLOPs, bytes."""

    kind: str
    calls: int = 0
    us: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    kernels: set[str] = field(default_factory=set)

    def add(self, us: float, flops: float, moved: float, kernels: Iterable[str]) -> None:
        """Add a call."""
        self.calls, self.us = self.calls + 1, self.us + us
        self.flops, self.bytes = self.flops + flops, self.bytes + moved
        self.kernels.update(kernels)

    def roof_us(self, roofs: Roofs) -> float:
        """Microseconds at the roof; what was faster gathered, and did not read its arguments whole."""
        flops = roofs.flops * (FLOAT8_TIMES if self.kind == FLOAT8 else 1)
        return min(self.us, 1e6 * max(self.flops / flops, self.bytes / roofs.bytes))


def analyse(
    events: list[dict[str, Any]], steps: int, roofs: Roofs, step_ms: float | None = None
) -> dict[str, Any]:
    """Return classes, calls and gaps of a step in milliseconds.

    Args:
        events: the complete events of a trace of `steps` steps.
        step_ms: what a step takes without the profiler, which slows the host: the device is idle for what it is not
            busy of that. Without it, from the trace alone.
    """
    on_device = [event for event in events if event.get("cat") in DEVICE_CATS]
    works: dict[str, Work] = {}
    for name, kind, us, flops, moved, kernels in (
        device_calls(events, on_device) if on_device else cpu_calls(events)
    ):
        works.setdefault(name, Work(kind)).add(us, flops, moved, kernels)
    stepping = [work for work in works.values() if work.kind == "optimiser"]
    total_us = sum(work.us for work in stepping)
    for work in stepping:  # whose lists of tensors have no shapes in a trace
        work.bytes, work.flops = roofs.optimizer_bytes * steps * work.us / max(total_us, 1e-9), 0.0
    idle = list(_idle(on_device))
    busy_us = _union(on_device) if on_device else sum(work.us for work in works.values())
    rows = [_row(name, work, steps, roofs) for name, work in works.items()]
    by_class: dict[str, dict[str, float]] = defaultdict(lambda: {"ms": 0.0, "roof_ms": 0.0, "calls": 0.0})
    for row in rows:
        for key in ("ms", "roof_ms", "calls"):
            by_class[row["class"]][key] += row[key]
    gaps = sorted(rows, key=lambda row: row["roof_ms"] - row["ms"])
    traced_idle_ms = sum(us for us, _ in idle) / 1e3 / steps
    is_known = step_ms is not None and bool(on_device)
    idle_ms = max(0.0, (step_ms or 0.0) - busy_us / 1e3 / steps) if is_known else traced_idle_ms
    found = [{"what": row["name"], **_gap(row)} for row in gaps[:GAPS]]
    found.append({"what": IDLE, "class": IDLE, "ms": idle_ms, "roof_ms": 0.0, "gap_ms": idle_ms})
    return {
        "steps": steps,
        "is_device": bool(on_device),
        "roof_tflops": roofs.flops / 1e12,
        "roof_tb_s": roofs.bytes / 1e12,
        "busy_ms": busy_us / 1e3 / steps,
        "idle_ms": idle_ms,
        "traced_idle_ms": traced_idle_ms,
        "step_ms": step_ms,
        "roof_ms": sum(row["roof_ms"] for row in rows),
        "without_roof_ms": sum(row["ms"] for row in rows if not row["roof_ms"]),
        "classes": dict(sorted(by_class.items(), key=lambda item: -item[1]["ms"])),
        "gaps": sorted(found, key=lambda gap: -gap["gap_ms"])[:GAPS],
        "idle_between": _places(idle, steps),
        "calls": sorted(rows, key=lambda row: -row["ms"])[:60],
    }


def _row(name: str, work: Work, steps: int, roofs: Roofs) -> dict[str, Any]:
    seconds = work.us / 1e6
    return {
        "name": name,
        "class": work.kind,
        "calls": work.calls / steps,
        "ms": work.us / 1e3 / steps,
        "roof_ms": work.roof_us(roofs) / 1e3 / steps,
        "tflops": work.flops / seconds / 1e12 if seconds else 0.0,
        "tb_s": work.bytes / seconds / 1e12 if seconds else 0.0,
        "kernels": sorted(work.kernels)[:4],
    }


def _gap(row: dict[str, Any]) -> dict[str, Any]:
    return {
        **{key: row[key] for key in ("class", "ms", "roof_ms", "calls")},
        "gap_ms": row["ms"] - row["roof_ms"],
    }


def _spans(on_device: list[dict[str, Any]]) -> list[tuple[float, float, str]]:
    return sorted((event["ts"], event["ts"] + event["dur"], event["name"]) for event in on_device)


def _union(on_device: list[dict[str, Any]]) -> float:
    """Microseconds in which at least one kernel runs."""
    busy, until = 0.0, -math.inf
    for start, end, _ in _spans(on_device):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy


def _idle(on_device: list[dict[str, Any]]) -> Iterator[tuple[float, str]]:
    """The times between kernels in which none runs, and the two kernels."""
    until, before = math.inf, ""
    for start, end, name in _spans(on_device):
        if start > until:
            yield start - until, f"{short_name(before)} -> {short_name(name)}"
        if end > until or until == math.inf:
            until, before = end, name


def _places(idle: list[tuple[float, str]], steps: int) -> list[dict[str, Any]]:
    places: dict[str, float] = defaultdict(float)
    for us, where in idle:
        places[where] += us
    largest = sorted(places.items(), key=lambda item: -item[1])[:10]
    return [{"between": where, "ms": us / 1e3 / steps} for where, us in largest]


def roofs_of(device: torch.device, params: int) -> Roofs:
    """Return the recorded roofs of an H200, or measure one product and one copy on a CPU."""
    if device.type == "cuda":
        return Roofs(H200_FLOPS, H200_BYTES, float(ADAMW_BYTES * params))
    a, x = torch.randn(512, 512), torch.randn(2**23)
    taken = []
    for call in (lambda: a @ a, lambda: x.clone()):
        call()
        seconds = []
        for _ in range(5):
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
        taken.append(min(seconds))
    return Roofs(2 * 512**3 / taken[0], 2 * 4 * 2**23 / taken[1], float(ADAMW_BYTES * params))


def as_markdown(found: dict[str, Any]) -> list[str]:
    """Return the classes, the largest gaps and the calls that take the most as lines of Markdown."""
    unit = "kernels" if found["is_device"] else "ops (no GPU in the trace)"
    whole = found["busy_ms"] + found["idle_ms"]
    lines = [
        f"{unit}: {whole:.2f} ms a step, {found['busy_ms']:.2f} busy and {found['idle_ms']:.2f} idle, or slower than "
        f"in the trace, which is idle for {found['traced_idle_ms']:.2f}; at the roofs "
        f"({found['roof_tflops']:.3g} TFLOP/s, {found['roof_tb_s']:.3g} TB/s) {found['roof_ms']:.2f} ms; "
        f"of what takes {found['without_roof_ms']:.2f} ms no shapes are known",
        "",
        "| class | ms a step | share | at the roof, ms | calls |",
        "|---|---|---|---|---|",
    ]
    for kind, row in found["classes"].items():
        share = row["ms"] / max(whole, 1e-9)
        lines.append(
            f"| {kind} | {row['ms']:.2f} | {share:.1%} | {row['roof_ms']:.2f} | {row['calls']:.0f} |"
        )
    lines += ["", "| largest gaps | class | ms a step | at the roof, ms | gap, ms |", "|---|---|---|---|---|"]
    lines += [
        f"| `{gap['what'][:90]}` | {gap['class']} | {gap['ms']:.2f} | {gap['roof_ms']:.2f} | **{gap['gap_ms']:.2f}** |"
        for gap in found["gaps"]
    ]
    return lines


def report(
    trace: Path, steps: int, step_ms: float | None, roofs: Roofs, out: Path, about: dict[str, Any]
) -> dict[str, Any]:
    """Analyse a trace, write it as JSON and Markdown, and return their paths and the analysis."""
    found = analyse(load_trace(trace), steps, roofs, step_ms)
    lines = as_markdown(found)
    write_json(out, {"benchmark": "step_profile", **about, **found})
    calls = [
        f"| `{row['name'][:90]}` | {row['class']} | {row['calls']:.0f} | {row['ms']:.2f} | {row['roof_ms']:.2f} | "
        f"{row['tflops']:.0f} | {row['tb_s']:.2f} |"
        for row in found["calls"]
    ]
    head = [
        "",
        "| call | class | calls | ms | at the roof, ms | TFLOP/s | TB/s |",
        "|---|---|---|---|---|---|---|",
    ]
    write_whole(out.with_suffix(".md"), "\n".join([*lines, *head, *calls]) + "\n")
    return {"file": out.name, "trace": str(trace), "lines": lines}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path)
    parser.add_argument("--steps", type=int, default=3, help="that the trace holds")
    parser.add_argument("--step-ms", type=float, help="of a step without the profiler")
    parser.add_argument(
        "--params", type=int, default=1_235_814_400, help="of the model, for the optimiser's bytes"
    )
    parser.add_argument("--flops-roof", type=float, default=H200_FLOPS)
    parser.add_argument("--bytes-roof", type=float, default=H200_BYTES)


def run(words: argparse.Namespace, record: Record) -> int | None:
    roofs = Roofs(words.flops_roof, words.bytes_roof, float(ADAMW_BYTES * words.params))
    about = {
        "made_by": record.made_by,
        "machine": {"trace": str(words.trace)},
    }
    out = record.out or words.trace.with_name(f"{words.trace.name.split('.')[0]}_profile.json")
    print("\n".join(report(words.trace, words.steps, words.step_ms, roofs, out, about)["lines"]))
    return 0
