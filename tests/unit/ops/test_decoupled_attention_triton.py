"""The Triton kernels of attention over keys of two parts against float64: on a GPU in both 16-bit dtypes and at the
widths of the presets, without one in Triton's interpreter, by `tests/ops/test_units_in_the_interpreter.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from caramba.ops.decoupled_attention import decoupled_attention
from tests.unit.ops.kernel_device import DEVICE, HAS_GPU, RUNS_KERNELS, attached_kernels

pytestmark = RUNS_KERNELS
OPS = torch.ops.caramba
DTYPES = [torch.float16, torch.bfloat16] if HAS_GPU else [torch.float16, torch.float32]  # no bf16 is interpreted


@pytest.fixture(autouse=True, scope="module")
def attached() -> Iterator[None]:
    yield from attached_kernels("decoupled_attention", "decoupled_attention_backward")


@dataclass(frozen=True)
class Shape:
    """Batch, queries, keys, query heads, heads of the three streams, and widths of the parts and of values."""

    batch: int
    n_queries: int
    n_keys: int
    heads: int
    streams: tuple[int, int, int]
    widths: tuple[int, int, int]

    def __str__(self) -> str:
        return f"{self.batch}x{self.n_queries}on{self.n_keys}-{self.heads}h{self.streams}-{self.widths}"


CASES = [  # tiles are of 16 and 32 tokens in the interpreter
    Shape(2, 37, 37, 2, (2, 1, 2), (64, 256, 64)),
    Shape(1, 34, 67, 2, (1, 1, 1), (128, 256, 128)),
    Shape(2, 19, 50, 4, (2, 4, 1), (32, 128, 16)),
    Shape(1, 1, 35, 2, (2, 1, 2), (64, 256, 64)),
    Shape(1, 65, 65, 2, (2, 2, 2), (128, 256, 128)),
    Shape(1, 32, 64, 2, (2, 1, 2), (64, 256, 64)),
]
LARGE = [
    Shape(2, 2048, 2048, 8, (8, 1, 8), (64, 256, 64)),
    Shape(1, 1000, 3001, 8, (8, 1, 8), (64, 256, 64)),
    Shape(1, 1100, 1900, 16, (1, 1, 1), (128, 256, 128)),
]
SHAPES = [*CASES, *(LARGE if HAS_GPU else [])]
# In the interpreter a second dtype takes no other branch: two shapes show its rounding.
RUNS = [(shape, dtype) for shape in SHAPES for dtype in DTYPES if HAS_GPU or dtype == DTYPES[0]]
RUNS += [] if HAS_GPU else [(CASES[1], DTYPES[1]), (CASES[2], DTYPES[1])]
SOME = DTYPES if HAS_GPU else DTYPES[:1]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def inputs(shape: Shape, dtype: torch.dtype) -> list[Tensor]:
    """Queries and the streams, contiguous; scores have a deviation of 1.5."""
    sem, geo, _ = shape.widths
    q = drawn(shape.batch, shape.n_queries, shape.heads, sem + geo) * (1.5 * (sem + geo) ** -0.5)
    pairs = zip(shape.streams, shape.widths, strict=True)
    keys = (drawn(shape.batch, shape.n_keys, *pair, seed=1 + i) for i, pair in enumerate(pairs))
    return [x.to(dtype) for x in (q, *keys)]


def documents(shape: Shape) -> Tensor:
    """First keys of documents of all lengths, one of which is a single token."""
    n = shape.n_queries
    places = torch.arange(n)
    rows = []
    for row in range(shape.batch):
        cuts = torch.tensor(sorted({0, (n // 3 + row) % n, min(n // 3 + row + 1, n - 1), 2 * n // 3}))
        rows.append(cuts[torch.bucketize(places, cuts, right=True) - 1])
    return torch.stack(rows).to(DEVICE)


class Exact:
    """The op and its gradients in float64, and sums of absolute terms that bound what rounding once in a product does."""

    def __init__(self, given: list[Tensor], first: Tensor | None, grad: Tensor | None = None) -> None:
        q, k_sem, k_geo, v = (x.detach().double().transpose(1, 2) for x in given)
        heads, n_queries, n_keys = q.shape[1], q.shape[2], v.shape[2]
        self.streams = [x.shape[1] for x in (k_sem, k_geo, v)]
        k_sem, k_geo, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k_sem, k_geo, v))
        sem, k = k_sem.shape[-1], torch.cat((k_sem, k_geo), dim=-1)
        places = torch.arange(n_keys, device=q.device)
        hidden = places > places[n_keys - n_queries :, None]
        if first is not None:
            hidden = (hidden | (places < first[:, :, None]))[:, None]
        scores = (q @ k.mT).masked_fill(hidden, -math.inf)
        self.lse, p = scores.logsumexp(-1), scores.softmax(-1)
        self.out, self.out_terms = (p @ v).transpose(1, 2), (p @ v.abs()).transpose(1, 2)
        if grad is None:
            return
        grads = grad.double().transpose(1, 2)
        out = self.out.transpose(1, 2)
        through = grads @ v.mT - (grads * out).sum(-1, keepdim=True)
        # What the kernel reads of `out` is rounded.
        ds, terms = p * through, p * (through.abs() + (grads * out).abs().sum(-1, keepdim=True))
        joined = [ds.mT @ q, terms.mT @ q.abs()]
        keys = [[x[..., :sem], x[..., sem:]] for x in joined]
        self.grads = [
            (x.transpose(1, 2), bound.transpose(1, 2))
            for x, bound in (
                (ds @ k, terms @ k.abs()),
                *((self._shared(x, i), self._shared(y, i)) for i, (x, y) in enumerate(zip(*keys, strict=True))),
                (self._shared(p.mT @ grads, 2), self._shared(p.mT @ grads.abs(), 2)),
            )
        ]

    def _shared(self, x: Tensor, stream: int) -> Tensor:
        return x.unflatten(1, (self.streams[stream], -1)).sum(2)


def assert_within(ours: Tensor, want: Tensor, terms: Tensor, what: str) -> None:
    """Weights and what comes through them are rounded before products, results once more. In fp16 small weights are
    rounded to multiples of 2^-24; the interpreter's fp32 leaves exponentials and the order of sums."""
    eps = max(torch.finfo(ours.dtype).eps, 1e-5)
    bound = eps * want.abs() + eps * terms + 2**-14 * terms.std() * (ours.dtype == torch.float16) + 1e-6
    worst = float(((ours.double() - want).abs() / bound).amax())
    assert worst <= 1, f"{what}, {tuple(ours.shape)}: error is {worst:.2f} of the bound"


def run(given: list[Tensor], first: Tensor | None, grad: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    out, lse = OPS.decoupled_attention.default(*given, first)
    return out, lse, OPS.decoupled_attention_backward.default(grad, *given, first, out, lse)


def check(given: list[Tensor], first: Tensor | None, grad: Tensor) -> None:
    out, lse, grads = run(given, first, grad)
    exact, dtype = Exact(given, first, grad), given[0].dtype
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert_within(out, exact.out, exact.out_terms, "out")
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), exact.lse, rtol=1e-5, atol=1e-4)
    for name, x, ours, (want, terms) in zip(("q", "k_sem", "k_geo", "v"), given, grads, exact.grads, strict=True):
        assert (ours.shape, ours.dtype) == (x.shape, dtype)
        assert ours.is_contiguous()
        assert_within(ours, want, terms, f"gradient of {name}")


@pytest.mark.parametrize(("shape", "dtype"), RUNS, ids=str)
def test_kernels_against_float64(shape: Shape, dtype: torch.dtype) -> None:
    given = inputs(shape, dtype)
    check(given, None, drawn(*given[0].shape[:3], shape.widths[2], seed=5, dtype=dtype))


@pytest.mark.parametrize("dtype", SOME)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.n_queries == shape.n_keys], ids=str)
def test_documents(shape: Shape, dtype: torch.dtype) -> None:
    given = inputs(shape, dtype)
    check(given, documents(shape), drawn(*given[0].shape[:3], shape.widths[2], seed=5, dtype=dtype))


def test_documents_of_one_token_read_their_own_value() -> None:
    shape = Shape(1, 40, 40, 2, (2, 1, 2), (64, 256, 64))
    given = inputs(shape, DTYPES[0])
    alone = torch.arange(40, device=DEVICE)[None]
    out, _, grads = run(given, alone, torch.ones_like(given[3]))
    torch.testing.assert_close(out, given[3], rtol=0, atol=1e-3)
    torch.testing.assert_close(grads[3], torch.ones_like(given[3]), rtol=0, atol=1e-3)
    assert grads[1].abs().amax() < 0.05, "one key leaves the softmax nothing to choose"


@pytest.mark.parametrize("dtype", SOME)
@pytest.mark.parametrize("is_absorbed", [False, True])
def test_a_cache_is_read_where_it_lies(dtype: torch.dtype, is_absorbed: bool) -> None:
    """Streams by heads first, or side by side in one buffer, of more tokens than there are; beyond them is NaN."""
    batch, heads, n_queries, n_keys, capacity = 2, 2, 35, 67, 80
    sem, geo, value = (128, 256, 128) if is_absorbed else (64, 256, 64)
    q = drawn(batch, heads, n_queries, sem + geo) * (sem + geo) ** -0.5
    q = q.to(dtype).transpose(1, 2)
    if is_absorbed:
        buffer = drawn(batch, 1, capacity, sem + geo, seed=1, dtype=dtype)
        buffer[:, :, n_keys:] = math.nan
        c, k_geo = buffer[:, :, :n_keys].transpose(1, 2).split((sem, geo), dim=-1)
        given = [q, c, k_geo, c]
    else:
        buffers = [
            drawn(batch, k, capacity, d, seed=i, dtype=dtype) for i, k, d in ((1, 2, sem), (2, 1, geo), (3, 2, value))
        ]
        for x in buffers:
            x[:, :, n_keys:] = math.nan
        given = [q, *(x[:, :, :n_keys].transpose(1, 2) for x in buffers)]
    check(given, None, drawn(batch, heads, n_queries, value, seed=5, dtype=dtype).transpose(1, 2))


def test_gradients_of_any_strides_and_through_the_public_function() -> None:
    shape = Shape(2, 19, 35, 2, (2, 1, 2), (64, 256, 64))
    given = inputs(shape, DTYPES[0])
    grad = torch.ones((), dtype=DTYPES[0], device=DEVICE).expand(2, 19, 2, 64)  # of a plain sum
    wanted = run(given, None, grad.contiguous())
    leaves = [x.detach().requires_grad_() for x in given]
    out = decoupled_attention(*leaves)
    assert torch.equal(out, wanted[0])
    for ours, want in zip(torch.autograd.grad(out, leaves, grad), wanted[2], strict=True):
        assert torch.equal(ours, want), "the same bits again, as no sum depends on who comes first"
    wide = [torch.cat((x, x), dim=-1)[..., ::2] for x in given]  # of no unit stride
    check(wide, None, grad)


def test_large_scores_and_rows_of_nothing() -> None:
    shape = Shape(1, 40, 70, 2, (2, 1, 2), (64, 256, 64))
    q, *keys = inputs(shape, DTYPES[0])
    out, lse = OPS.decoupled_attention.default(q * 300, *keys, None)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    assert lse.abs().amax() > 500
    for given in ([q[:0], *(x[:0] for x in keys)], [q[:, :0], *keys]):
        out, lse, grads = run(given, None, given[0][..., :64])
        assert (out.shape, lse.shape) == ((*given[0].shape[:3], 64), (len(given[0]), 2, given[0].shape[1]))
        assert [x.shape for x in grads] == [x.shape for x in given]
        assert not any(x.any() for x in grads)
