"""The CUDA kernel of products of codes of 4 bits against float64, in the emulator of a warp."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from caramba.ops.small_batch_linear import reference_small_batch_linear
from tests.ops.emulated import KERNELS, MODES, EmulatedKernel, needs_compiler
from tests.ops.test_small_batch_linear import arguments, in_words
from tests.ops.test_small_batch_linear_triton import BOUNDS, upcast

pytestmark = needs_compiler
int4_gemv = importlib.import_module("caramba.kernels.cuda.int4_gemv")


def run(given: dict[str, Any], way: Any = None, mode: int = 0) -> Tensor:
    """Return what the kernel makes of the arguments of the op."""
    x, norm = given["x"], given["norm"]
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    n_out = given["weight"].shape[0] // (2 if given["gated"] else 1)
    product = int4_gemv.Int4Shape(n_out, width, int4_gemv.most_rows(rows), given["gated"])
    way = way or int4_gemv.heuristic_tile(product)
    kind = int4_gemv.norm_kind(x, norm, given["eps"])
    macros = int4_gemv.macros(
        product,
        way,
        in_bf16=x.dtype == torch.bfloat16,
        norm=kind,
        has_bias=given["bias"] is not None,
        has_residual=given["residual"] is not None,
    )
    y = torch.full((*x.shape[:-1], n_out), torch.nan, dtype=x.dtype)
    names = ("x", "weight", "scale", "bias", "residual", "norm")
    tensors = [None if given[name] is None else given[name].contiguous() for name in names]
    held = [None if one is None else aligned(one) for one in (*tensors, y)]
    shared = int4_gemv.shared_bytes(product, way, is_normed=kind != "none")
    eps = np.float32(given["eps"] or 0.0)
    kernel = EmulatedKernel(KERNELS / "int4_gemv.cu", "int4_gemv", macros)
    kernel((int4_gemv.n_blocks(product, way), 1), 32 * way.warps, shared, [*held, n_out, rows, eps], mode)
    assert held[-1] is not None
    return torch.from_numpy(held[-1]).view(x.dtype).reshape(y.shape)


def aligned(x: Tensor) -> np.ndarray:
    """A tensor's bits at a multiple of 16 bytes, where those of a GPU begin."""
    bits = (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy().ravel()
    room = np.zeros(bits.nbytes + 16, np.uint8)
    place = -room.ctypes.data % 16
    found = room[place : place + bits.nbytes].view(bits.dtype)
    found[:] = bits
    return found


@pytest.mark.parametrize(
    ("rows", "gated", "dtype", "without"),
    [
        (1, True, torch.bfloat16, ()),
        (1, False, torch.bfloat16, ("bias", "residual")),
        (1, False, torch.float16, ("bias", "norm")),
        (1, True, torch.float16, ("bias", "norm", "eps", "residual")),
        (3, True, torch.bfloat16, ("norm", "eps")),  # several rows are normalised before
        (19, False, torch.bfloat16, ("bias", "norm", "eps")),
        (19, True, torch.float16, ("norm", "eps", "residual")),
    ],
)
def test_against_float64(rows: int, gated: bool, dtype: torch.dtype, without: tuple[str, ...]) -> None:
    given = in_words(arguments(rows, 384, 37, gated, dtype) | dict.fromkeys(without), 128)
    found, wide = run(given), reference_small_batch_linear(**upcast(given))
    assert float((found.double() - wide).norm() / wide.norm()) <= BOUNDS[dtype]


@pytest.mark.parametrize(
    ("way", "rows"), [((1, 1, 1), 9), ((1, 4, 2), 1), ((1, 4, 2), 9), ((2, 2, 1), 1), ((2, 8, 1), 9)]
)
def test_every_way_each_time_alike(way: tuple[int, int, int], rows: int) -> None:
    """Groups that warps share unevenly, and rows of the last block that there are none of."""
    given = in_words(arguments(rows, 640, 21, rows == 1, torch.float16), 128)
    given |= {"norm": given["norm"].float()} if rows == 1 else {"norm": None, "eps": None}
    wide = reference_small_batch_linear(**upcast(given))
    found = [run(given, int4_gemv.Int4Tile(*way), mode) for mode in MODES]
    assert float((found[0].double() - wide).norm() / wide.norm()) <= BOUNDS[torch.float16]
    assert all(torch.equal(one, found[0]) for one in found[1:])


class Emulated:
    """In the place of `CudaLaunch`: the same arguments, on this host."""

    def __init__(
        self, source: str, name: str, macros: dict[str, object], grid: tuple[int, int], threads: int,
        shared_bytes: int, n_tensors: int, scalars: tuple[int, ...], otherwise: object, early: bool,
    ) -> None:  # fmt: skip
        self.kernel, self.n_tensors, self.scalars = (
            EmulatedKernel(KERNELS / source, name, macros),
            n_tensors,
            scalars,
        )
        self.where = grid, threads, shared_bytes

    def __call__(self, *tensors: Tensor | None) -> None:
        assert len(tensors) == self.n_tensors
        held = [None if one is None else aligned(one) for one in tensors]
        self.kernel(*self.where, [*held, *self.scalars])
        y, made = tensors[-1], held[-1]
        assert y is not None
        assert made is not None
        y.copy_(torch.from_numpy(made).view(y.dtype).reshape(y.shape))


@pytest.mark.parametrize("norm", [torch.float16, None])
def test_the_launcher_hands_over_what_the_kernel_takes(
    norm: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    module = importlib.import_module("caramba.kernels.triton.int4_gemv")
    for name, value in (("is_ready", lambda device: True), ("CudaLaunch", Emulated), ("_made", {})):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "_tuned", {})
    rows = 1 if norm else 3
    given = in_words(arguments(rows, 256, 19, True, torch.bfloat16), 128)
    given |= {"norm": given["norm"].to(norm)} if norm else {"norm": None, "eps": None}
    wide = reference_small_batch_linear(**upcast(given))
    product = int4_gemv.Int4Shape(19, 256, int4_gemv.most_rows(rows), True)
    for way in (int4_gemv.heuristic_tile(product), int4_gemv.Int4Tile(2, 1, 1)):
        module.load_tuned({product: way})
        found = module.int4_gemv(**given, y=torch.empty_like(given["residual"]))
        assert float((found.double() - wide).norm() / wide.norm()) <= BOUNDS[torch.bfloat16]
        (launch,) = module._made.values()
        assert launch.where[1] == 32 * way.warps
    small = in_words(arguments(1, 256, 19, True, torch.bfloat16), 64)
    key = (1, 19, 256, 4, None, True, -1)
    assert module._of_tensor_cores(key, small["x"], None, None, None, launch) is None


def test_scalars_of_launches_are_bits() -> None:
    for x in (0.0, 1e-5, -2.5):
        assert int4_gemv.bits_of(x) == int(np.float32(x).view(np.int32))


def test_ways_fill_a_device_and_fit_it() -> None:
    for n_out, width, rows, gated in (
        (3072, 2048, 1, False), (2048, 2048, 1, False), (8192, 2048, 1, True), (2048, 8192, 64, False),
        (128256, 2048, 64, False), (40, 16384, 1, False),
    ):  # fmt: skip
        product = int4_gemv.Int4Shape(n_out, width, rows, gated)
        way = int4_gemv.heuristic_tile(product)
        blocks = int4_gemv.n_blocks(product, way)
        assert blocks * way.warps >= 1024 or way.warps == int4_gemv.MOST_WARPS // (1 if rows == 1 else 2)
        assert int4_gemv.shared_bytes(product, way, is_normed=rows == 1) <= 227 * 1024
        assert blocks * way.tiles * (8 if gated else 16) >= n_out
