"""Time of caramba's kernels against torch in eager and torch.compile, bf16, against a copy. Writes JSON and PNG.

Sides run in turns as replays of CUDA graphs over sets of tensors larger than the cache, all results kept. The roof of a
row is a copy of as many bytes in the same turns. Errors are against float64.

Usage on a GPU: python scripts/bench/run.py kernels [--seconds 240] [--only rms_norm,rope] [--out FILE]
On any machine: python scripts/bench/run.py kernels --size tiny --seconds 5 --no-compile --out /tmp/kernels.json
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from models import rotate
from plots import draw_kernels
from record import Record
from registry import UsageError, check_names
from timing import device_seconds, host_seconds, interleave, spread, wall_seconds
from torch import Tensor
from torch._functorch import config as functorch_config

from caramba import kernels
from caramba.ops import implementation
from caramba.ops.adamw import adamw_step
from caramba.ops.backend import all_ops
from caramba.ops.layer_norm import add_layer_norm, layer_norm
from caramba.ops.lion import lion_step
from caramba.ops.norm_dropout_activation import norm_dropout_activation
from caramba.ops.philox import dropout_mask
from caramba.ops.rms_norm import add_rms_norm, rms_norm
from caramba.ops.rope import rope
from caramba.ops.small_batch_linear import small_batch_linear
from caramba.ops.swiglu import swiglu

Call = Callable[..., Any]
HOST_MUST_US = 25.0
COLD_BYTES = 200_000_000  # over three times the L2 of an H200


@dataclass(frozen=True)
class Case:
    """`ours` and `peer` take what `make(rows)` returns; what requires a gradient there is differentiated.

    `bytes_per_row` and `backward_bytes_per_row` are what must move at least; a backward of 0 is not measured. `must`
    and `backward_must` are shares of the copy roof. `exact` is what ours should give where the peer draws random
    numbers of its own. `host` prepares the call whose host time counts, where `ours` does more than call the op.
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
        # Results of every set stay, so that none is written into another's cache lines.
        self.kept: list[Any] = []
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
    # Work in place must not see another side's result.
    tensors = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in case.make(rows))
    wide = tuple(x.detach().double().requires_grad_(x.requires_grad) for x in tensors)
    with torch.set_grad_enabled(is_backward):
        found = [outputs(call(*tensors)), outputs((case.exact or case.peer)(*wide))]
    if is_backward:
        results = [[y for y in ys if y.requires_grad] for ys in found]
        grads = [torch.randn_like(y) for y in results[0]]
        found = [
            list(torch.autograd.grad(ys, [x for x in xs if x.requires_grad], [g.to(ys[0].dtype) for g in grads]))
            for ys, xs in zip(results, (tensors, wide), strict=True)
        ]
    pairs = ((x.double(), y.double()) for x, y in zip(*found, strict=True))
    return max(float((x - y).norm() / y.norm()) for x, y in pairs)


def host_calls(case: Case, rows: int) -> dict[str, Callable[[], Any]]:
    """Return the calls whose host time counts: an eager one and, where there is a gradient, a backward."""
    tensors = case.make(min(case.rows, rows))
    if case.host is not None:
        return {"forward": case.host(tensors)}
    results = [y for y in outputs(case.ours(*tensors)) if y.requires_grad]
    wanted = [x for x in tensors if x.requires_grad]
    grads = [torch.randn_like(y) for y in results]
    return {
        "forward": lambda: case.ours(*tensors),
        "backward": lambda: torch.autograd.grad(results, wanted, grads, retain_graph=True),
    }


def host_us(case: Case, is_backward: bool, device: torch.device) -> float:
    """Microseconds that the host spends, on few rows, on an eager call without gradients, or on a backward."""
    call = host_calls(case, 8)["backward" if is_backward else "forward"]
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
    sides = {name: Side(call, [case.make(rows) for _ in range(n_sets)], is_backward) for name, call in calls.items()}
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
        "host_us": host_us(case, is_backward, device),
        "host_must_us": HOST_MUST_US,
        "sides": {},
    }
    for name in calls:
        median = statistics.median(times[name])
        row["sides"][name] = {
            **spread(times[name], "us"),
            "of_copy": n_bytes / median / roof,
            "error": errors.get(name),
        }
    return row


EPS, SEED, P = 1e-5, 12345, 0.1
LION = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
ADAMW = LION | {"eps": 1e-8}


def drawer(device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype).requires_grad_()

    return draw


def lion(w: Tensor, m: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Lion's update of one tensor in place, in plain torch."""
    wide, moment, slope = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (w, m, g))
    sign = torch.sign(moment * LION["beta1"] + slope * (1 - LION["beta1"]))
    w.copy_(wide * (1 - LION["lr"] * LION["weight_decay"]) - sign * LION["lr"])
    m.copy_(moment * LION["beta2"] + slope * (1 - LION["beta2"]))
    return w, m


def our_lion(w: Tensor, m: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    lion_step(list(w.unbind()), list(m.unbind()), list(g.unbind()), **LION)
    return w, m


def adamw(w: Tensor, m: Tensor, v: Tensor, g: Tensor, steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """AdamW's first update in place, in plain torch: what it counts is not read."""
    wide, moment, square, slope = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (w, m, v, g))
    moment = moment.lerp(slope, 1 - ADAMW["beta1"])
    square = square.lerp(slope * slope, 1 - ADAMW["beta2"])
    size = moment / (1 - ADAMW["beta1"]) / ((square / (1 - ADAMW["beta2"])).sqrt() + ADAMW["eps"])
    w.copy_(wide * (1 - ADAMW["lr"] * ADAMW["weight_decay"]) - ADAMW["lr"] * size)
    m.copy_(moment)
    v.copy_(square)
    return w, m, v


def our_adamw(w: Tensor, m: Tensor, v: Tensor, g: Tensor, steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    adamw_of((w, m, v, g, steps))()
    return w, m, v


def adamw_of(stacked: tuple[Tensor, ...]) -> Callable[[], None]:
    w, m, v, g, steps = (list(x.unbind()) for x in stacked)
    return lambda: adamw_step(w, m, v, steps, g, **ADAMW)


def lion_of(stacked: tuple[Tensor, ...]) -> Callable[[], None]:
    lists = [list(x.unbind()) for x in stacked]
    return lambda: lion_step(*lists, **LION)


def norms(device: torch.device, dtype: torch.dtype, width: int) -> list[Case]:
    draw, size = drawer(device, dtype), dtype.itemsize * width
    rows = 2**26 // width

    def plain_sum(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
        def add_reference(x: Tensor, r: Tensor, *vectors: Tensor) -> tuple[Tensor, Tensor]:
            total = x + r
            return norm(total, *vectors), total

        return add_reference

    def rms(x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(x, (width,), w, EPS)

    def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), w, b, EPS)

    def vectors(n: int) -> list[Tensor]:
        return [draw(width) for _ in range(n)]

    made: tuple[tuple[str, int, int, Call, Call], ...] = (
        ("rms_norm", 1, 1, lambda x, w: rms_norm(x, w, EPS), rms),
        ("add_rms_norm", 2, 1, lambda x, r, w: add_rms_norm(x, r, w, EPS), plain_sum(rms)),
        ("layer_norm", 1, 2, lambda x, w, b: layer_norm(x, w, b, EPS), layer),
        ("add_layer_norm", 2, 2, lambda x, r, w, b: add_layer_norm(x, r, w, b, EPS), plain_sum(layer)),
    )
    found = []
    for op, n_wide, n_vectors, ours, peer in made:

        def make(n: int, n_wide: int = n_wide, n_vectors: int = n_vectors) -> tuple[Tensor, ...]:
            return (*(draw(n, width) for _ in range(n_wide)), *vectors(n_vectors))

        moved = (2 * n_wide * size, (2 + n_wide if n_wide > 1 else 3) * size)
        found.append(Case(f"{op} {width}", op, rows, f"{{rows}} x {width}", make, ours, peer, *moved))
    return found


def others(device: torch.device, dtype: torch.dtype) -> list[Case]:
    draw = drawer(device, dtype)
    heads, width, d_ff, model = 32, 64, 8192, 2048

    def heads_of(n: int) -> tuple[Tensor, ...]:
        x = draw(1, n, heads, width).detach().transpose(1, 2).requires_grad_()
        angles = torch.arange(n, device=device)[:, None] * torch.logspace(0, -4, width // 2, device=device)
        return x, angles.cos()[None], angles.sin()[None]

    def drop(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.gelu(F.dropout(F.layer_norm(x, (model,), w, b, EPS), P))

    def drop_exact(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        """With the mask that the op draws."""
        mask = dropout_mask(SEED, P, x.shape[0], model, x.device)
        return F.gelu(F.layer_norm(x, (model,), w, b, EPS) * mask / (1 - P))

    def product_of(n: int) -> tuple[Tensor, ...]:
        return tuple(x.detach() for x in (draw(n, model), draw(2 * d_ff, model), draw(model)))

    def gate_up(x: Tensor, w: Tensor, norm: Tensor) -> Tensor:
        gate, up = F.linear(F.rms_norm(x, (model,), norm, EPS), w).chunk(2, -1)
        return F.silu(gate) * up

    def tensors_of(n: int) -> tuple[Tensor, ...]:
        return tuple(draw(n, 1024, 1024).detach() for _ in range(3))

    def states_of(n: int) -> tuple[Tensor, ...]:
        w, m, g = tensors_of(n)
        return w, m, (g * g).detach(), g, torch.zeros(n, device=device)

    size = dtype.itemsize
    turned = 2 * heads * width * size
    gated = (3 * d_ff * size, 5 * d_ff * size)
    norm_drop = {"activation": "gelu", "eps": EPS, "p": P, "seed": SEED}
    rope_shape = f"1 x {heads} x {{rows}} x {width}, heads inner"
    must: dict[str, Any] = {"backward_must": 0.88}
    return [
        Case("rope", "rope", 32768, rope_shape, heads_of, rope, rotate, turned, turned, **must),
        Case(
            *("swiglu", "swiglu", 8192, f"{{rows}} x {d_ff}", lambda n: (draw(n, d_ff), draw(n, d_ff))),
            *(swiglu, lambda gate, up: F.silu(gate) * up, *gated),
            **must,
        ),
        Case(
            *(
                "swiglu packed",
                "swiglu_packed",
                8192,
                f"{{rows}} x 2 x {d_ff}",
                lambda n: (draw(n, 2 * d_ff),),
            ),
            *(swiglu, lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], *gated),
            **must,
        ),
        Case(
            *("norm, dropout, gelu", "norm_dropout_activation", 32768, f"{{rows}} x {model}"),
            lambda n: (draw(n, model), draw(model), draw(model)),
            lambda x, w, b: norm_dropout_activation(x, w, b, **norm_drop),
            *(drop, 2 * model * size, 3 * model * size),
            exact=drop_exact,
        ),
        Case(
            *("norm, gate, up", "small_batch_linear", 1, f"{{rows}} x {model} by {d_ff} x 2", product_of),
            lambda x, w, norm: small_batch_linear(x, w, norm=norm, eps=EPS, gated=True),
            *(gate_up, 2 * d_ff * model * size),
        ),
        Case(
            *("adamw", "adamw_step", 64, "{rows} tensors of 1024 x 1024", states_of, our_adamw, adamw),
            7 * 1024 * 1024 * size,
            host=adamw_of,
        ),
        Case(
            *("lion", "lion_step", 64, "{rows} tensors of 1024 x 1024", tensors_of, our_lion, lion),
            5 * 1024 * 1024 * size,
            host=lion_of,
        ),
    ]


def cases(device: torch.device, dtype: torch.dtype) -> list[Case]:
    """Every case; rows are those of the full size, of 64 MB and more."""
    return [*norms(device, dtype, 2048), *norms(device, dtype, 8192), *others(device, dtype)]


TINY_ROWS = 32
OPTIONS = "--size=full|tiny --seconds=240.0 --only=* --no-compile"
SMOKE_OPTIONS = "--size tiny --seconds 0.1 --no-compile --device cpu --only rope swiglu lion_step"


def run(options: argparse.Namespace, record: Record) -> None:
    device = record.device
    if options.size == "full" and device.type == "cpu":
        raise UsageError("--size full needs a CUDA device; use --size tiny here")
    kernels.load(device)
    # A captured backward runs again on the same tensors.
    functorch_config.donated_buffer = False
    torch.manual_seed(0)
    chosen = cases(device, torch.bfloat16)
    check_names("--only", options.only, {case.op for case in chosen})
    chosen = [case for case in chosen if not options.only or case.op in options.only]
    work = [(case, back) for case in chosen for back in (False, True) if not back or case.backward_bytes_per_row]
    record.start(size=options.size)
    for case, is_backward in work:
        n_rows = case.rows if options.size == "full" else min(case.rows, TINY_ROWS if case.rows > 64 else 1)
        seconds = options.seconds / len(work)
        record.add(measure(case, n_rows, is_backward, not options.no_compile, seconds, device))
    record.write_plot(draw_kernels(record.data))
