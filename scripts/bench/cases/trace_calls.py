"""The calls of a trace of torch's profiler: ops with the kernels they launched, and FLOPs and bytes by their shapes."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
