"""Random calls of the ops that have Metal kernels, and how far a result may be from float64."""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from caramba.ops.backend import all_ops
from caramba.ops.dba_decode import ZEROS
from tests.ops.decode_cases import Case, arguments
from tests.ops.metal_mutants import MUTANTS, Mutant

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
OPS = (
    *("rms_norm", "add_rms_norm", "rms_norm_backward", "layer_norm", "add_layer_norm", "layer_norm_backward"),
    *("rope", "lion_step", "dba_decode"),
)
MOST_NUMBERS = 2**18
WIDTHS = (1, 2, 31, 32, 33, 64, 100, 257, 1000)
RELATIVE, ULPS = 1e-5, 1.0
CANCELLED = 2.0**-8
"""Results this much below the largest are sums that cancelled: their last place is that of this size."""


@dataclass(frozen=True)
class Call:
    """One call of an op: its arguments, in the op's order."""

    op: str
    dtype: torch.dtype
    args: tuple[Any, ...]

    def run(self, function: Callable[..., Any], *, in_float64: bool = False) -> list[Tensor]:
        """Return the results of a function, or what it wrote in place."""
        args = _copied(self.args, in_float64)
        if self.op.startswith("add_") and in_float64:  # the sum is rounded before it is normalised
            total = (self.args[0].float() + self.args[1].float()).to(self.dtype).double()
            args = (total, torch.zeros_like(total), *args[2:])
        if self.op == "rope" and in_float64:
            args = (*args[:5], torch.float64)
        found = function(*args)
        if found is None:
            return [x for group in args[:2] for x in group]
        return [found] if isinstance(found, Tensor) else list(found)


def _copied(x: Any, in_float64: bool) -> Any:
    if isinstance(x, Tensor):
        wide = in_float64 and x.is_floating_point()
        return x.to(torch.float64) if wide else torch.empty_like(x).copy_(x) if x._base is None else x
    if isinstance(x, (list, tuple)):
        return type(x)(_copied(one, in_float64) for one in x)
    return x


def launcher(op: str) -> Callable[..., Any]:
    """Return the op's launcher of kernels/metal."""
    from caramba.kernels import find_launcher

    return find_launcher(all_ops()[op], "metal")


def kernel_of(op: str) -> str:
    """Return the name of the kernel that an op launches: one adds a residual or does not."""
    return op.removeprefix("add_")


def reference(op: str) -> Callable[..., Any]:
    """Return the op's reference."""
    contract = importlib.import_module(all_ops()[op].module)
    return getattr(contract, f"reference_{op}")  # dba_decode's is the one that dequantises


def calls(op: str, name: str, count: int, seed: int = 0) -> Iterator[Call]:
    """Draw calls of an op in a dtype: ragged and empty shapes, rows of one, views with strides, vectors or none."""
    for i in range(count):
        draw = random.Random(f"{op} {name} {seed} {i}")
        generator = torch.Generator().manual_seed(draw.randrange(2**31))
        yield Call(op, DTYPES[name], _DRAWN[op](draw, generator, DTYPES[name]))


def _tensor(draw: random.Random, generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Draw numbers, sometimes as a view whose rows lie apart, or whose axes are exchanged."""
    kind = draw.choice(("plain", "plain", "apart", "exchanged"))
    if kind == "apart" and len(shape) > 1:
        whole = torch.randn((*shape[:-1], shape[-1] + 3), generator=generator).to(dtype)
        return whole[..., 1:-2]
    if kind == "exchanged" and len(shape) > 2:
        swapped = (shape[1], shape[0], *shape[2:])
        return torch.randn(swapped, generator=generator).to(dtype).transpose(0, 1)
    return torch.randn(shape, generator=generator).to(dtype)


def _rows(draw: random.Random) -> tuple[int, ...]:
    axes = draw.randrange(3)
    sizes = tuple(draw.choice((0, 1, 2, 3, 5, 9)) if draw.random() < 0.95 else 140 for _ in range(axes))
    shape = (*sizes, draw.choice(WIDTHS))
    # The emulator keeps 56 bytes for a byte of a buffer: 140 rows of 140 of 1,000 numbers would take gigabytes.
    return shape if math.prod(shape) <= MOST_NUMBERS else (max(sizes), shape[-1])


def _vector(draw: random.Random, generator: torch.Generator, width: int, dtype: torch.dtype) -> Tensor | None:
    if draw.random() < 0.25:
        return None
    return torch.randn(width, generator=generator).to(dtype)


def _norm(is_layer: bool, adds: bool) -> Callable[..., tuple[Any, ...]]:
    def made(draw: random.Random, generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
        shape = _rows(draw)
        given = [_tensor(draw, generator, shape, dtype) for _ in range(2 if adds else 1)]
        kind = draw.choice((dtype, torch.float32))
        vectors = [_vector(draw, generator, shape[-1], kind) for _ in range(2 if is_layer else 1)]
        return (*given, *vectors, draw.choice((1e-6, 1e-5)))

    return made


def _norm_backward(is_layer: bool) -> Callable[..., tuple[Any, ...]]:
    def made(draw: random.Random, generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
        shape = _rows(draw)
        grad, grad_sum, x = (_tensor(draw, generator, shape, dtype) for _ in range(3))
        kind = draw.choice((dtype, torch.float32))
        vectors = [_vector(draw, generator, shape[-1], kind) for _ in range(2 if is_layer else 1)]
        wide = x.float()
        mean = wide.mean(-1)
        squares = (wide - mean[..., None]) if is_layer else wide
        rstd = torch.rsqrt(squares.pow(2).mean(-1) + 1e-5)
        kept = (mean, rstd) if is_layer else (rstd,)
        return (grad, grad_sum if draw.random() < 0.5 else None, x, *kept, *vectors)

    return made


def _rope(draw: random.Random, generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    groups, per_group = draw.choice((1, 1, 2, 3)), draw.choice((1, 2, 4))
    batch, n_tokens, half = (
        draw.choice((0, 1, 1, 2, 3)),
        draw.choice((0, 1, 2, 7)),
        draw.choice((1, 3, 16, 33, 64)),
    )
    x = _tensor(draw, generator, (batch, groups * per_group, n_tokens, 2 * half), dtype)
    if draw.random() < 0.5:  # tokens first, as projections give them
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    lead = (batch,) if draw.random() < 0.4 else ()
    kind = draw.choice((dtype, torch.float32))
    angles = torch.randn((*lead, groups, n_tokens, half), generator=generator)
    out = draw.choice((dtype, dtype, torch.float32, torch.bfloat16))
    scale = draw.choice((1.0, 0.125))
    return x, angles.cos().to(kind), angles.sin().to(kind), scale, draw.random() < 0.5, out


def _lion(draw: random.Random, generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    sizes = [(draw.choice((0, 1, 31, 32, 300)),) for _ in range(draw.randrange(1, 4))]
    kinds = (dtype, draw.choice((dtype, torch.float32)), dtype)
    groups = [[torch.randn(size, generator=generator).to(kind) for size in sizes] for kind in kinds]
    rates = (draw.choice((1e-3, 0.5)), 0.9, 0.99, draw.choice((0.0, 0.1)))
    return (*groups, *rates)


def _decode(draw: random.Random, generator: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    name = next(name for name, kind in DTYPES.items() if kind == dtype)
    is_latent = draw.random() < 0.4
    other = draw.choice(("fp16", "bf16"))
    kinds = list(draw.choice(((name,) * 3, (name,) * 3, (other, name, other), ("fp32",) * 3)))
    kinds = kinds[: 2 if is_latent else 3]
    kv_heads = 1 if is_latent else draw.choice((1, 2, 3))
    widths = (1, 8, 16, 24, 33, 64, 128)
    lengths = tuple(draw.choice((0, 1, 5, 32, 33, 100, 128, 150)) for _ in range(draw.choice((1, 1, 2, 3))))
    case = Case(
        tuple(kinds),
        lengths,
        (kv_heads * draw.choice((1, 2, 4, 5)), kv_heads),
        (draw.choice(widths), draw.choice(widths[1:]), draw.choice(widths)),
        queries=draw.choice((1, 1, 1, 2, 3, 8)),
        capacity=draw.choice((160, max(lengths) or 1)),
        window=draw.choice((None, None, 1, 20, 70)),
        null=draw.random() < 0.3,
        seed=draw.randrange(2**31),
    )
    call = decode_call(case, dtype, draw.choice((0, 0, 1, 3, 7)))
    if draw.random() < 0.1:  # keys of one part: the other is a row of zeros for all
        geo = call[4][0]
        zeros = torch.zeros((1, 1, 1, geo.shape[3]), dtype=torch.bfloat16).expand(geo.shape)
        return (*call[:2], [kinds[0], ZEROS, *kinds[2:]], call[3], [zeros], *call[5:])
    return call


def decode_call(case: Case, dtype: torch.dtype, n_splits: int) -> tuple[Any, ...]:
    """Return the op's arguments for a case of decode attention."""
    (q_sem, q_geo, sem, geo, v, lengths), options = arguments(case, dtype)
    kinds = [str(x.kind) for x in (sem, geo, v) if x is not None]
    null = list(options.get("null") or ())
    streams = [x.tensors for x in (sem, geo, v) if x is not None]
    if case.seed % 2:  # views of one tensor that holds two streams side by side, and of a wider one
        if kinds[0] == kinds[1]:
            both = torch.cat((streams[0][0], streams[1][0]), dim=3)
            streams[:2] = [[x] for x in both.split((case.dims[0], case.dims[1]), dim=3)]
        if v is not None:
            streams[2] = [torch.cat((streams[2][0],) * 2, dim=3)[..., : case.dims[2]]]
    rest = (lengths, options.get("n_packed"), null, case.window or 0, 0, n_splits)
    return (q_sem, q_geo, kinds, *streams, *([] if v is not None else [[]]), *rest)


_DRAWN: dict[str, Callable[..., tuple[Any, ...]]] = {
    "rms_norm": _norm(False, False),
    "add_rms_norm": _norm(False, True),
    "rms_norm_backward": _norm_backward(False),
    "layer_norm": _norm(True, False),
    "add_layer_norm": _norm(True, True),
    "layer_norm_backward": _norm_backward(True),
    "rope": _rope,
    "lion_step": _lion,
    "dba_decode": _decode,
}


def ulps(found: Tensor, expected: Tensor) -> float:
    """Return the largest distance in units of the last place of `found`'s dtype."""
    if not found.numel():
        return 0.0
    size = expected.abs().clamp(min=_largest(expected) * CANCELLED, max=_largest(expected))
    step = torch.exp2(torch.frexp(size.clamp(min=torch.finfo(found.dtype).tiny))[1].double() - 1)
    apart = (found.double() - expected).abs() / (step * torch.finfo(found.dtype).eps)
    return float(torch.where(_are_same(found, expected), 0.0, apart).max())


def relative(found: Tensor, expected: Tensor, terms: float = 0.0) -> float:
    """Return the largest distance over the largest number, or over that of the terms that it is a sum of."""
    if not found.numel():
        return 0.0
    apart = torch.where(_are_same(found, expected), 0.0, (found.double() - expected).abs())
    return float(apart.max()) / max(_largest(expected), terms, 1e-30)


def _are_same(found: Tensor, expected: Tensor) -> Tensor:
    """Compare elements; infinities and NaN are like themselves."""
    return (found.double() == expected) | (found.isnan() & expected.isnan())


def _largest(x: Tensor) -> float:
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 1.0


@dataclass(frozen=True)
class Errors:
    """The largest errors of some results: of float32 relative, of 16 bits in ulps more than the reference's."""

    relative: float = 0.0
    more_ulps: float = -1e9

    def with_(self, other: Errors) -> Errors:
        return replace(
            self,
            relative=max(self.relative, other.relative),
            more_ulps=max(self.more_ulps, other.more_ulps),
        )

    @property
    def are_small(self) -> bool:
        return self.relative <= RELATIVE and self.more_ulps <= ULPS


def errors_of(call: Call, found: list[Tensor]) -> Errors:
    """Compare results with float64, and 16-bit ones with the reference's distance from it.

    Raises:
        AssertionError: another shape, dtype or order of strides than the reference's.
    """
    expected = call.run(reference(call.op), in_float64=True)
    own = call.run(reference(call.op))
    errors = Errors()
    for i, (x, want, like) in enumerate(zip(found, expected, own, strict=True)):
        assert _form(x) == _form(like), f"{call.op}: got {_form(x)}, the reference has {_form(like)}"
        if x.dtype == torch.float32 and call.op != "lion_step":
            errors = errors.with_(Errors(relative=_or_worst(relative(x, want, _terms(call, i - len(found))))))
        else:
            more = ulps(x, want.double()) - ulps(like, want.double())
            errors = errors.with_(Errors(more_ulps=_or_worst(more)))
    return errors


def _terms(call: Call, place: int) -> float:
    """Return the size of the terms of a result that is a sum which may cancel wholly, from the last result backwards.

    They are a row's numbers for its mean, and a norm's gradient has them in rows of one or two numbers.
    """
    if not call.args[0].numel():
        return 0.0
    if call.op.endswith("layer_norm") and place == -2:
        x = call.args[0].double()
        return float((x + call.args[1] if call.op.startswith("add") else x).abs().mean(-1).max())
    if not call.op.endswith("_backward"):
        return 0.0
    grad, rstd = call.args[0], call.args[4 if call.op.startswith("layer") else 3]
    weight = call.args[5 if call.op.startswith("layer") else 4]
    return _largest(grad) * _largest(rstd) * (1.0 if weight is None else _largest(weight))


def _form(x: Tensor) -> tuple[Any, ...]:
    """Return shape, dtype, and the strides of axes that have any."""
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1 and x.numel()]
    return tuple(x.shape), x.dtype, strides


def _or_worst(error: float) -> float:
    return error if error == error else float("inf")


SHOWN_BY = {
    "rms_norm": ("rms_norm", "add_rms_norm"),
    "layer_norm": ("layer_norm", "add_layer_norm"),
    "column_sums": ("rms_norm_backward",),
    "dba_decode_merge": ("dba_decode",),
}
"""Ops that launch a kernel which is not of their name."""


def surviving(kernel: str, emulator: Any, count: int = 50) -> list[str]:
    """Return the mistakes in a kernel that no call in fp32 shows."""
    ops = SHOWN_BY.get(kernel, (kernel,))
    chosen = [
        call
        for op in ops
        for call in calls(op, "fp32", count * (1 + 2 * (op == "dba_decode")))
        if _shows_mutants(kernel, call)
    ]
    chosen += _special(kernel)

    def run(call: Call) -> list[Tensor]:
        return call.run(launcher(call.op))

    def mutation(mutant: Mutant) -> Callable[[str], str]:
        return lambda source: mutant.of(source) if f"kernel void {kernel}(" in source else source

    emulator.prepare(lambda: [run(call) for call in chosen], *(mutation(mutant) for mutant in MUTANTS[kernel]))
    left = []
    for mutant in MUTANTS[kernel]:
        emulator.use(mutation(mutant))
        if not any(_is_wrong(call, run) for call in chosen):
            left.append(f"{kernel}: {mutant.old} -> {mutant.new} (place {mutant.nth})")
    emulator.use(str)
    return left


def _is_wrong(call: Call, run: Callable[[Call], list[Tensor]]) -> bool:
    try:
        return not errors_of(call, run(call)).are_small
    except RuntimeError:  # the emulator stopped the launch
        return True


def _shows_mutants(kernel: str, call: Call) -> bool:
    """Whether a call has one set of types, so that mutants compile once or a few times."""
    if kernel.startswith("dba_decode"):
        q, _, kinds = call.args[:3]
        n_rows = q.shape[1] // call.args[3][0].shape[1] * q.shape[2]
        one_set = all(kind == "fp32" for kind in kinds)
        return one_set and (n_rows in (1, 3, 4) if kernel == "dba_decode" else n_rows in (3, 4))
    return not isinstance(call.args[0], Tensor) or call.args[0].numel() < 10_000


def _special(kernel: str) -> list[Call]:
    """Signs of zero and of NaN; two numbers whose mean is between two of float32."""
    if kernel == "layer_norm":
        close = torch.tensor([[1.0, 1.0 + 1001 * 2.0**-23]])
        return [Call("layer_norm", torch.float32, (close, None, None, 1e-6))]
    if kernel != "lion_step":
        return []
    nan = float("nan")
    groups = [[torch.tensor(x)] for x in ([1.0, 2.0, 3.0], [0.0, -0.0, nan], [0.0, 0.0, -2.0])]
    return [Call("lion_step", torch.float32, (*groups, 0.5, 0.9, 0.99, 0.1))]
