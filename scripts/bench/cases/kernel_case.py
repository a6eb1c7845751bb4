"""One row of the table of kernels, and how it is timed against torch in eager and compiled."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from timing import device_seconds, host_seconds, interleave, spread, wall_seconds
from torch import Tensor

from caramba.ops import implementation
from caramba.ops.backend import all_ops

Call = Callable[..., Any]
HOST_MUST_US = 25.0
COLD_BYTES = 200_000_000  # over three times the L2 of an H200


@dataclass(frozen=True)
class Case:
    """`ours` and `peer` take what `make(rows)` returns; what requires a gradient there is differentiated.

    `bytes_per_row` and `backward_bytes_per_row` are what must move at least; a backward of 0 is not measured. `must`
    and `backward_must` are shares of the copy roof. `flops_per_row` is for work bound by arithmetic. `exact` is what
    ours should give where the peer draws random numbers of its own. `host` prepares the call whose host time counts,
    where `ours` does more than call the op.
    """

    name: str
    op: str
    rows: int
    shape: str
    make: Callable[[int], tuple[Tensor, ...]]
    ours: Call
    peer: Call
    bytes_per_row: int
    backward_bytes_per_row: int = 0
    must: float = 0.88
    backward_must: float = 0.70
    flops_per_row: int = 0
    exact: Call | None = None
    host: Callable[[tuple[Tensor, ...]], Callable[[], Any]] | None = None

    @property
    def backward_op(self) -> str:
        """The op that the gradient runs: rope is its own, and a sum's gradient passes through."""
        name = f"{self.op.removeprefix('add_')}_backward"
        return name if name in all_ops() else self.op


def outputs(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


class Side:
    """One implementation on sets of tensors that together exceed the cache; `once` runs it on each set."""

    def __init__(self, call: Call, sets: list[tuple[Tensor, ...]], is_backward: bool) -> None:
        self.call, self.sets, self.is_backward = call, sets, is_backward
        self.kept: list[
            Any
        ] = []  # results of every set stay, so that none is written into another's cache lines
        self.graph: torch.cuda.CUDAGraph | None = None
        self.forwards: list[tuple[list[Tensor], list[Tensor], list[Tensor]]] = []
        if not sets[0][0].is_cuda:
            self._prepare()
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._prepare()  # a backward runs on its forward's stream, which must be the one captured
            for _ in range(3):
                self.once()
        torch.cuda.synchronize()
        self.kept.clear()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.once()

    def _prepare(self) -> None:
        if not self.is_backward:
            return
        for tensors in self.sets:
            results = [y for y in outputs(self.call(*tensors)) if y.requires_grad]
            wanted = [x for x in tensors if x.requires_grad]
            self.forwards.append((results, wanted, [torch.randn_like(y) for y in results]))

    def once(self) -> None:
        self.kept.clear()
        if self.is_backward:
            for results, wanted, grads in self.forwards:
                self.kept.append(torch.autograd.grad(results, wanted, grads, retain_graph=True))
        else:
            with torch.no_grad():
                for tensors in self.sets:
                    self.kept.append(self.call(*tensors))

    def seconds(self) -> float:
        """Time of one set."""
        if self.graph is None:
            return wall_seconds(self.once, torch.device("cpu")) / len(self.sets)
        return device_seconds(self.graph.replay, torch.device("cuda")) / len(self.sets)


def error_of(case: Case, call: Call, is_backward: bool, rows: int) -> float:
    """The largest |got - want| / |want|, in norms, over results, or over gradients, of float64."""
    want_of = case.exact or case.peer
    tensors = case.make(rows)
    # Work in place must not see another side's result.
    tensors = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in tensors)
    wide = tuple(x.detach().double().requires_grad_(x.requires_grad) for x in tensors)
    if not is_backward:
        with torch.no_grad():
            got, want = outputs(call(*tensors)), outputs(want_of(*wide))
    else:
        results = [
            [y for y in outputs(f(*inputs)) if y.requires_grad]
            for f, inputs in ((call, tensors), (want_of, wide))
        ]
        grads = [torch.randn_like(y) for y in results[0]]
        got, want = (
            torch.autograd.grad(
                ys, [x for x in inputs if x.requires_grad], [g.to(ys[0].dtype) for g in grads]
            )
            for ys, inputs in zip(results, (tensors, wide), strict=True)
        )
    return max(
        float((x.double() - y.double()).norm() / y.double().norm()) for x, y in zip(got, want, strict=True)
    )


def host_us(case: Case, is_backward: bool, device: torch.device) -> float:
    """Microseconds that the host spends, on few rows, on an eager call without gradients, or on a backward."""
    tensors = case.make(min(case.rows, 8))
    if is_backward:
        results = [y for y in outputs(case.ours(*tensors)) if y.requires_grad]
        wanted = [x for x in tensors if x.requires_grad]
        grads = [torch.randn_like(y) for y in results]

        def call() -> Any:
            return torch.autograd.grad(results, wanted, grads, retain_graph=True)
    elif case.host is not None:
        call = case.host(tensors)
    else:

        def call() -> Any:
            return case.ours(*tensors)

    # Without a device the call is the work itself, of which twice is enough.
    repeats, calls = (6, 50) if device.type == "cuda" else (1, 2)
    with torch.no_grad():
        return 1e6 * host_seconds(call, device, calls, repeats)


def copy_side(n_bytes: int, n_sets: int, device: torch.device) -> Side:
    """A copy that reads and writes `n_bytes` together."""
    pairs = [
        tuple(torch.randint(255, (n_bytes // 2,), dtype=torch.uint8, device=device) for _ in range(2))
        for _ in range(n_sets)
    ]
    return Side(lambda source, target: target.copy_(source), pairs, False)  # pyright: ignore[reportArgumentType]


def measure(
    case: Case, rows: int, is_backward: bool, compiled: bool, seconds: float, device: torch.device
) -> dict[str, Any]:
    """Time ours, the peer and a copy of as many bytes in turns for `seconds`, at least five each."""
    n_bytes = rows * (case.backward_bytes_per_row if is_backward else case.bytes_per_row)
    cold = COLD_BYTES if device.type == "cuda" else 0
    n_sets = min(max(2, -(-cold // n_bytes)), 64)
    calls: dict[str, Call] = {"ours": case.ours, "eager": case.peer}
    if compiled:
        torch._dynamo.reset()
        calls["compiled"] = torch.compile(case.peer, fullgraph=True, dynamic=False)
    comparable = calls if case.exact is None else {"ours": case.ours}
    errors = {name: error_of(case, call, is_backward, rows) for name, call in comparable.items()}
    sides = {
        name: Side(call, [case.make(rows) for _ in range(n_sets)], is_backward)
        for name, call in calls.items()
    }
    sides["copy"] = copy_side(n_bytes, n_sets, device)
    measured = {name: side.seconds for name, side in sides.items()}
    times = interleave(measured, repeats=5, warm=2, seconds=seconds, most=400)
    roof = n_bytes / statistics.median(times["copy"])
    row: dict[str, Any] = {
        "name": case.name,
        "pass": "backward" if is_backward else "forward",
        "shape": case.shape.format(rows=rows),
        "rows": rows,
        "bytes": n_bytes,
        "sets": n_sets,
        "turns": len(times["ours"]),
        "implementation": implementation(case.backward_op if is_backward else case.op, device),
        "must": case.backward_must if is_backward else case.must,
        "copy_tb_s": roof / 1e12,
        "sides": {},
    }
    row |= {"host_us": host_us(case, is_backward, device), "host_must_us": HOST_MUST_US}
    for name in calls:
        median = statistics.median(times[name])
        row["sides"][name] = {
            **spread(times[name], "us"),
            "of_copy": n_bytes / median / roof,
            "error": errors.get(name),
        }
        if case.flops_per_row:
            row["sides"][name]["tflop_s"] = rows * case.flops_per_row / median / 1e12
    return row
