"""The Triton kernels of a latent layer's decode step that do the work of two ops, against these ops' references: on a GPU
in both dtypes and at the widths of the presets, without one in Triton's interpreter."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from caramba.ops import backend
from caramba.ops.absorbed_step import absorbed_queries, absorbed_step, reference_absorbed_queries
from caramba.ops.dba_append import reference_dba_append
from caramba.ops.small_batch_linear import reference_per_head_linear
from tests.unit.ops.kernel_device import DEVICE, HAS_GPU, RUNS_KERNELS, attached_kernels

pytestmark = RUNS_KERNELS
DTYPES = [torch.float16, *([torch.bfloat16] if HAS_GPU else [])]
# Sequences, tokens, heads, features of a head, of the latent, of the geometric part.
STEPS = [(1, 1, 3, 6, 10, 4), (33, 1, 2, 16, 70, 70), (3, 7, 2, 24, 130, 80)]
STEPS += [(32, 1, 32, 64, 128, 64), (1, 1, 32, 64, 128, 256), (130, 1, 16, 128, 512, 64)] if HAS_GPU else []
# Sequences, queries, heads, of the latent, of a head, splits, by the kernel that ends the read in 16 bits.
UPS = {
    "_values_kernel": [
        (1, 1, 3, 10, 6, 1),
        (1, 2, 1, 128, 6, 65),
        (1, 1, 2, 520, 16, 64),
        (1, 1, 1, 128, 16, 161),
        (1, 1, 1, 128, 16, 264),
    ],
    "_up_many": [
        (1, 1, 2, 256, 16, 33),
        (1, 1, 2, 130, 70, 60),
        (1, 1, 1, 128, 6, 65),
        (1, 1, 1, 128, 16, 132),
        (1, 1, 1, 128, 16, 160),
        (1, 1, 3, 20, 8, 512),
    ],
    "_up_row": [(1, 1, 2, 48, 40, 7), (2, 3, 2, 16, 20, 5), (1, 1, 2, 256, 16, 32), (1, 2, 1, 128, 6, 64)],
    "_up_rows": [(17, 1, 2, 24, 40, 3), (5, 7, 2, 48, 8, 8), (16, 1, 3, 33, 64, 16)],
}
if HAS_GPU:
    UPS["_values_kernel"] += [
        (1, 1, 32, 128, 64, 264),
        (1, 1, 32, 128, 128, 132),
        (1, 4, 32, 128, 64, 33),
        (2, 1, 32, 512, 64, 9),
    ]
    UPS["_up_many"] += [(1, 1, 32, 128, 64, n) for n in (65, 132, 133, 160)]
    UPS["_up_row"] += [(1, 1, 32, 128, 64, 64), (1, 8, 32, 128, 64, 8), (2, 1, 32, 512, 64, 8)]
    UPS["_up_rows"] += [(32, 1, 32, 128, 64, 8), (64, 1, 32, 512, 128, 2)]
READS = [(kernel, shape) for kernel, shapes in UPS.items() for shape in shapes]
# The interpreter takes long for each split: there limits are such that few splits of little take every way.
FEW = [
    ("_values_kernel", (1, 1, 3, 10, 6, 1)),
    ("_values_kernel", (2, 2, 1, 24, 6, 3)),
    ("_up_many", (1, 1, 2, 20, 70, 19)),
    ("_up_row", (1, 1, 2, 48, 40, 7)),
    ("_up_row", (2, 3, 2, 16, 20, 4)),
    ("_up_rows", (17, 1, 2, 24, 40, 3)),
    ("_up_rows", (4, 4, 1, 33, 8, 2)),
]
FEW_FP32 = ("_values_kernel", "_up_row")
LIMITS = {"_values_kernel": ("MOST_ELEMENTS", "MOST_OF_MANY"), "_up_many": ("MOST_ELEMENTS",)}


def ending(kernel: str, shape: tuple[int, int, int, int, int, int], dtype: torch.dtype) -> str:
    """What ends a read in `dtype` that `kernel` ends in 16 bits."""
    if kernel == "_up_many" and dtype == torch.float32:  # products of float32 would be in tf32
        return "_values_kernel"
    if kernel == "_up_rows" and dtype == torch.float32:
        launcher = importlib.import_module("caramba.kernels.triton.dba_decode_up")
        batch, n_queries, heads, *_ = shape
        return "_values_kernel" if batch * n_queries * heads > launcher.MOST_LANES else "_up_row"
    return kernel


@pytest.fixture(autouse=True, scope="module")
def attached() -> Iterator[None]:
    yield from attached_kernels("absorbed_queries", "per_head_linear", "absorbed_step", "dba_decode_up")


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("into", [torch.float32, None])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", STEPS)
def test_a_step_writes_what_its_two_ops_do(
    shape: tuple[int, int, int, int, int, int], dtype: torch.dtype, into: torch.dtype | None
) -> None:
    batch, n_tokens, heads, width, latent, geo = shape
    together = drawn(batch, n_tokens, 5 + heads * width + latent + geo, dtype=dtype)
    _, q, c, k_geo = together.split((5, heads * width, latent, geo), dim=-1)
    q, c, k_geo = q.unflatten(-1, (heads, width)), c[:, None], k_geo[:, None]
    sem_map = drawn(heads, width, latent, seed=1, dtype=dtype) * width**-0.5
    geo_map = drawn(heads, width, geo, seed=2, dtype=dtype) * width**-0.5
    capacity = n_tokens + 3
    # Before the start, at it, at the end, in part beyond it, and far beyond.
    places = torch.tensor([-1, 0, 3, 4, 2**30], dtype=torch.int32)
    lengths = places[(torch.arange(batch) + 1) % 5].to(DEVICE)
    # One table or a table for each row, one buffer or two: either with both.
    for widths, rows in zip(([latent + geo], [latent, geo]), (1, batch) if into else (batch, 1), strict=True):
        angles = drawn(*((rows, 1) if rows > 1 else (1,)), n_tokens, geo // 2, seed=4) * 3
        cos, sin = angles.cos(), angles.sin()
        buffers, wanted = (
            [drawn(batch, 1, capacity, d, seed=6, dtype=into or dtype) for d in widths] for _ in range(2)
        )
        found = absorbed_step(q, sem_map, geo_map, cos, sin, 0.3, c, k_geo, buffers, lengths)
        assert torch.equal(found, absorbed_queries(q, sem_map, geo_map, cos, sin, 0.3))
        reference_dba_append([c, k_geo], wanted, lengths, cos, sin, 1)
        for got, want in zip(buffers, wanted, strict=True):
            # A product and a sum rounded at once may give the other neighbour in 16 bits.
            bound = torch.finfo(dtype).eps
            torch.testing.assert_close(got, want, rtol=bound, atol=bound)
            assert torch.equal(got[..., :latent], want[..., :latent]) or len(widths) == 2


def test_wide_dtypes_and_no_rows_launch_nothing() -> None:
    q, maps = drawn(2, 1, 2, 4), drawn(2, 4, 6)
    table, lengths = drawn(1, 1, 3), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    c, buffers = drawn(2, 1, 1, 6), [drawn(2, 1, 3, 12)]

    def launched(*_: object) -> Tensor:
        raise AssertionError("a kernel was launched")

    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(backend.launchers, ("absorbed_step", DEVICE), launched)
        found = absorbed_step(q, maps, maps, table, table, 1.0, c, c, buffers, lengths)
    torch.testing.assert_close(found, reference_absorbed_queries(q, maps, maps, table, table, 1.0))
    none = [x[:0].half() for x in (q, c, *buffers)]
    found = absorbed_step(
        none[0], maps.half(), maps.half(), table, table, 1.0, none[1], none[1], [none[2]], lengths[:0]
    )
    assert found.shape == (0, 1, 2, 12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("kernel", "shape"), READS)
def test_the_sizes_of_a_read_choose_how_it_ends(
    kernel: str, shape: tuple[int, int, int, int, int, int], dtype: torch.dtype
) -> None:
    launcher = importlib.import_module("caramba.kernels.triton.dba_decode_up")
    plans = importlib.import_module("caramba.kernels.triton.dba_decode")
    batch, n_queries, heads, rank, width, n_splits = shape
    if dtype == torch.float32 and rank > 128:
        pytest.skip("no kernel takes these")
    q, q_geo = (drawn(batch, heads, n_queries, d, dtype=dtype) for d in (rank, 16))
    c, k_geo = (drawn(batch, 1, 20, d, dtype=dtype) for d in (rank, 16))
    kinds = ["fp32" if dtype == torch.float32 else "fp16"] * 2
    plan = plans.chosen(q, q_geo, kinds, [c], [k_geo], [], None, [], 0, 0, n_splits)
    finish = launcher.plan_up(plan, q, drawn(heads, rank, width, dtype=dtype)).finish
    chosen = "_values_kernel" if finish is None else finish.kernel.fn.__name__
    assert chosen == ending(kernel, shape, dtype)


@pytest.mark.parametrize(
    ("kernel", "shape", "dtype"),
    [
        (*read, dtype)
        for read in (READS if HAS_GPU else FEW)
        for dtype in (torch.float32, *DTYPES)
        if HAS_GPU or dtype != torch.float32 or read[0] in FEW_FP32
    ],
)
def test_a_read_is_joined_and_mapped(
    kernel: str,
    shape: tuple[int, int, int, int, int, int],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever way the launcher takes: the cache is short of some splits, which then hold nothing."""
    launcher = importlib.import_module("caramba.kernels.triton.dba_decode_up")
    decode = importlib.import_module("caramba.kernels.triton.dba_decode")
    batch, n_queries, heads, rank, width, n_splits = shape
    if dtype == torch.float32 and rank > 128:
        pytest.skip("no kernel takes these")
    if not HAS_GPU:
        for limit in LIMITS.get(kernel, ()):
            monkeypatch.setattr(launcher, limit, 0)
    geo, tokens = 16, 40 if HAS_GPU else 20
    q_sem = drawn(batch, heads, n_queries, rank, dtype=dtype) * rank**-0.5
    q_geo = drawn(batch, heads, n_queries, geo, seed=1, dtype=dtype) * 0.2
    c, k_geo = (
        drawn(batch, 1, tokens, rank, seed=2, dtype=dtype),
        drawn(batch, 1, tokens, geo, seed=3, dtype=dtype),
    )
    up = drawn(heads, rank, width, seed=4, dtype=dtype) * rank**-0.5
    seqlens = torch.tensor([tokens, 5, 0, 1], dtype=torch.int32)[torch.arange(batch) % 4].to(DEVICE)
    kinds = [{torch.float32: "fp32", torch.float16: "fp16"}.get(dtype, "bf16")] * 2
    ran: list[str] = []
    monkeypatch.setattr(launcher.Launch, "__call__", _noted(launcher.Launch.__call__, ran))
    decode.forget_plans()
    found = launcher.dba_decode_up(q_sem, q_geo, kinds, [c], [k_geo], seqlens, None, up, 0, 0, n_splits)
    read = _read(q_sem.double(), q_geo.double(), c.double(), k_geo.double(), seqlens).to(dtype)
    wanted = reference_per_head_linear(read.transpose(1, 2).double(), up.double())
    kernel = ending(kernel, shape, dtype)
    is_joined_apart = kernel == "_values_kernel" and n_splits > 1
    assert ran[1:] == ["combine_kernel", kernel] if is_joined_apart else [kernel]
    assert found.shape == (batch, n_queries, heads, width)
    assert found.is_contiguous()
    bound = {torch.float32: 1e-5, torch.float16: 3e-3}.get(dtype, 2e-2)
    torch.testing.assert_close(found.double(), wanted, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kernel", "n_splits"),
    [("_up_row", n) for n in (2, 9, 64)]
    + [("_up_many", n) for n in (65, 132, 160, 264)]
    + [("_up_row", 264), ("combine_kernel", 264)],
)
def test_every_split_counts_by_its_sum(
    kernel: str, n_splits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where splits hold unlike much, the last ones too; also beyond the limits, which are those of speed alone."""
    launcher = importlib.import_module("caramba.kernels.triton.dba_decode_up")
    plans = importlib.import_module("caramba.kernels.triton.dba_decode")
    heads, rank, width = 2, 128, 24
    q, c = drawn(1, heads, 1, rank, dtype=dtype), drawn(1, 1, 20, rank, dtype=dtype)
    kinds, up = (
        ["fp16" if dtype == torch.float16 else "bf16"] * 2,
        drawn(heads, rank, width, seed=1, dtype=dtype),
    )
    up = up * rank**-0.5
    plan = plans.chosen(q, q, kinds, [c], [c], [], None, [], 0, 0, n_splits)
    parts, sums = drawn(heads * n_splits, rank, seed=2, dtype=dtype), drawn(heads, n_splits, seed=3) * 2
    sums[0, 1], sums[1, -1] = -torch.inf, 20.0
    if n_splits == 264 and kernel != "combine_kernel":
        monkeypatch.setattr(launcher, {"_up_row": "MOST_ELEMENTS", "_up_many": "MOST_OF_MANY"}[kernel], 1 << 17)
    finish = launcher.plan_up(plan, q, up).finish
    y = q.new_empty(1, 1, heads, width)
    shares = torch.softmax(sums.double() * math.log(2), -1)
    wanted = (shares[:, None] @ parts.double().view(heads, n_splits, rank)).to(dtype).double()
    if kernel == "combine_kernel":
        assert finish is None
        y, wanted = q.new_empty(1, heads, 1, rank), wanted[None]
        plan.join(parts, sums, *([q] * len(plan.joined)), y, sums.new_empty(1, heads, 1))
    else:
        assert finish.kernel.fn.__name__ == kernel
        finish(parts, sums, up, y)
        wanted = (wanted @ up.double()).view(y.shape)
    torch.testing.assert_close(y.double(), wanted, rtol=0, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("most", "limits"),
    [("MOST_READ", (1920, 1919)), ("MOST_ELEMENTS", (80, 79)), ("MOST_LANES", (12, 11))],
)
def test_what_is_too_much_to_read_anew_is_joined_apart(
    most: str, limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 heads of all rows, in 24 programs, each of which reads 5 splits of 16 numbers."""
    launcher = importlib.import_module("caramba.kernels.triton.dba_decode_up")
    plans = importlib.import_module("caramba.kernels.triton.dba_decode")
    q, q_geo, c = drawn(2, 2, 3, 16), drawn(2, 2, 3, 16), drawn(2, 1, 20, 16)
    kinds, up = ["fp32", "fp32"], drawn(2, 16, 20)
    plan = plans.chosen(q, q_geo, kinds, [c], [c], [], None, [], 0, 0, 5)
    found = []
    for limit in limits:
        monkeypatch.setattr(launcher, most, limit)
        finish = launcher.plan_up(plan, q, up).finish
        found.append(None if finish is None else finish.kernel.fn.__name__)
    assert found == ["_up_row", None]


def _noted(call: object, ran: list[str]) -> object:
    def noted(self: object, *tensors: object, **options: object) -> None:
        ran.append(self.kernel.fn.__name__)  # type: ignore[attr-defined]
        call(self, *tensors, **options)  # type: ignore[operator]

    return noted


def _read(q_sem: Tensor, q_geo: Tensor, c: Tensor, k_geo: Tensor, seqlens: Tensor) -> Tensor:
    """Attention by a whole softmax, in float64: query t of n sees all but the last n - 1 - t tokens."""
    n_queries, n_keys = q_sem.shape[2], c.shape[2]
    scores = q_sem @ c.mT + q_geo @ k_geo.mT
    ends = seqlens[:, None] - (n_queries - 1) + torch.arange(n_queries, device=seqlens.device)
    seen = (torch.arange(n_keys, device=seqlens.device) < ends[..., None])[:, None]
    shares = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    return shares @ c
