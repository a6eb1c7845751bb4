"""The Triton kernel of `small_batch_linear` against float64, on a GPU or, by `test_in_the_interpreter.py`, interpreted."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from caramba.ops.small_batch_linear import MAX_ROWS_FP32, reference_small_batch_linear
from tests.ops.test_small_batch_linear import arguments, coded, in_words

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = torch.cuda.is_available()
pytestmark = [
    *([] if INTERPRETED else [pytest.mark.gpu]),
    pytest.mark.skipif(HAS_GPU == INTERPRETED, reason="needs a CUDA device, or TRITON_INTERPRET=1 without"),
]
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if HAS_GPU else [])]
# A part of a norm's, a product's and a sum's rounding each, of the norm of the result.
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
# Rows, width, results: odd ones, whole tiles, and on a GPU the shapes of a model of a billion weights.
SHAPES = [(1, 7, 5), (2, 100, 33), (8, 16, 12), (1, 1030, 1), (19, 144, 70)]
LARGE = [
    (1, 2048, 3072),
    (1, 8192, 2048),
    (8, 2048, 2048),
    (8, 3000, 8192),
    (16, 2048, 3072),
    (33, 8192, 2048),
    (64, 2048, 8192),
]


def upcast(given: dict[str, Any]) -> dict[str, Any]:
    """The same in float64; codes and what they are multiplied by stay."""
    kept = ("scale",) if given["weight"].dtype == torch.int16 else ()
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() and name not in kept else value
        for name, value in given.items()
    }


@pytest.mark.parametrize(
    ("shape", "has_codes", "gated", "dtype"),
    [
        (shape, has_codes, gated, dtype)
        for shape in (*SHAPES, *(LARGE if HAS_GPU else ()))
        for has_codes, gated, dtype in itertools.product((False, True), (False, True), DTYPES)
        # Without a GPU every pair of them, but not every three.
        if HAS_GPU or (has_codes + gated + DTYPES.index(dtype)) % 2
    ],
)
def test_the_kernel_against_float64(
    shape: tuple[int, int, int],
    has_codes: bool,
    gated: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = importlib.import_module("caramba.kernels.triton.small_batch_linear")
    if shape[0] > MAX_ROWS_FP32 and dtype == torch.float32:
        pytest.skip("the op takes the reference")
    if shape in LARGE and dtype == torch.float16:
        pytest.skip("compiled as bfloat16 is")
    if INTERPRETED:
        monkeypatch.setattr(module, "PROGRAMS", 2)  # tiles of many rows, whose last one is not full
    device = "cuda" if HAS_GPU else "cpu"
    for without in ((), ("bias", "norm"), ("residual", "bias", "norm", "eps"), ("residual", "bias")):
        given: dict[str, Any] = arguments(*shape, gated=gated, dtype=dtype) | dict.fromkeys(without)
        given = coded(given) if has_codes else given
        given = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
        wide = upcast(given)
        got, want = module.small_batch_linear(**given), reference_small_batch_linear(**wide)
        assert got.dtype == dtype
        assert got.shape == want.shape
        error = float((got.double() - want).norm() / want.norm())
        assert error <= BOUNDS[dtype], (without, error)


# Rows, groups of how many inputs, how many of them, results: one group, more words than a program takes at a time, programs
# that share a width of which the last has less; and on a GPU the forms of tensor cores.
WORDS = [(1, 32, 3, 5), (2, 64, 5, 33), (1, 128, 9, 12), (8, 32, 41, 3), (19, 128, 3, 70), (17, 128, 17, 20)]
LARGE_WORDS = [
    (1, 128, 16, 3072),
    (1, 128, 64, 2048),
    (8, 128, 16, 2048),
    (33, 128, 64, 2048),
    (64, 128, 16, 8192),
]


@pytest.mark.parametrize(
    ("shape", "gated", "dtype"),
    [
        (shape, gated, dtype)
        for i, shape in enumerate((*WORDS, *(LARGE_WORDS if HAS_GPU else ())))
        for gated, dtype in itertools.product((False, True), DTYPES)
        if HAS_GPU or (i + gated + DTYPES.index(dtype)) % 2 == 0
    ],
)
def test_words_of_codes_against_float64(shape: tuple[int, int, int, int], gated: bool, dtype: torch.dtype) -> None:
    launched = importlib.import_module("caramba.kernels.triton.small_batch_linear").small_batch_linear
    rows, group, n_groups, n_out = shape
    if rows > MAX_ROWS_FP32 and dtype == torch.float32:
        pytest.skip("the op takes the reference")
    device = "cuda" if HAS_GPU else "cpu"
    for without in ((), ("bias", "norm"), ("residual", "bias", "norm", "eps")):
        plain = arguments(rows, group * n_groups, n_out, gated, dtype) | dict.fromkeys(without)
        given = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in in_words(plain, group).items()
        }
        got, want = launched(**given), reference_small_batch_linear(**upcast(given))
        assert (got.dtype, got.shape) == (dtype, want.shape)
        assert float((got.double() - want).norm() / want.norm()) <= BOUNDS[dtype], without


@pytest.mark.skipif(not HAS_GPU, reason="tensor cores are of a GPU")
def test_words_take_the_kernel_of_tensor_cores_where_it_compiles() -> None:
    module = importlib.import_module("caramba.kernels.triton.int4_gemv")
    if importlib.import_module("caramba.kernels.cuda.nvrtc").version() is None:
        pytest.skip("needs NVRTC")
    given = in_words(arguments(1, 1024, 256, gated=True, dtype=torch.bfloat16), 128)
    given = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in given.items()}
    module._made.clear()
    importlib.import_module("caramba.kernels.triton.small_batch_linear").small_batch_linear(**given)
    (launch,) = module._made.values()
    assert launch.made is not None
    assert not launch.is_refused


def test_rows_do_not_depend_on_each_other_and_other_dtypes_are_refused() -> None:
    launched = importlib.import_module("caramba.kernels.triton.small_batch_linear").small_batch_linear
    device = "cuda" if HAS_GPU else "cpu"
    given = {
        name: value.to(device, torch.float32) if isinstance(value, Tensor) else value
        for name, value in arguments(3, 40, 3, gated=True).items()
    }
    together = launched(**given)
    one = given | {"x": given["x"][1:2], "residual": given["residual"][1:2]}
    torch.testing.assert_close(launched(**one), together[1:2], rtol=1e-6, atol=1e-6)
    wide = upcast(given)
    with pytest.raises(ValueError, match=r"small_batch_linear: got torch\.float64"):
        launched(**wide)


def test_measured_tiles_are_taken_and_others_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("caramba.kernels.triton.small_batch_linear")
    monkeypatch.setattr(module, "_measured", {})
    # Tiles fill a device where there are rows enough, and rows of x leave less room beside them.
    assert module.heuristic_tile(module.GemvShape(2048, 2048, 1, 2, False)) == module.GemvTile(4, 4)
    assert module.heuristic_tile(module.GemvShape(128256, 2048, 1, 2, False)) == module.GemvTile(8, 4)
    assert module.heuristic_tile(module.GemvShape(8192, 2048, 8, 2, True)) == module.GemvTile(2, 4)
    product = module.GemvShape(40, 64, 1, 4, False)
    guess = module.tile_of(product)
    module.load_tuned([(list(product), [guess.block_n * 2, 2])])
    assert module.tile_of(product) == module.GemvTile(guess.block_n * 2, 2)


# Rows rounded up, and a tile of each form: warps that share the width, tensor cores of a group of warps, programs that
# share the width; each with a last tile that is not full.
TILES = [
    (8, (16, 64, 4, 1, 4, 3), True),
    (16, (32, 64, 2, 2, 2, 3), False),
    (32, (64, 64, 1, 1, 4, 3), False),
    (64, (64, 64, 1, 4, 4, 3), True),
]


@pytest.mark.parametrize(
    ("rows", "tile", "gated", "has_codes"),
    [
        (*tile, has_codes)
        for i, tile in enumerate(TILES)
        for has_codes in (False, True)
        if HAS_GPU or has_codes == (i in (0, 2))
    ],
)
def test_every_form_of_tiles_each_time_alike(rows: int, tile: tuple[int, ...], gated: bool, has_codes: bool) -> None:
    module = importlib.import_module("caramba.kernels.triton.small_batch_gemm")
    width, n_out, device = 280, 70, "cuda" if HAS_GPU else "cpu"
    plain = arguments(rows - 1, width, n_out, gated, dtype=torch.float16)
    given: dict[str, Any] = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in (coded(plain) if has_codes else plain).items()
    }
    wide = upcast(given)
    want = reference_small_batch_linear(**wide)
    with pytest.MonkeyPatch.context() as patch:
        product = module.GemmShape(n_out, width, rows, gated)
        patch.setattr(module, "_tiles", {product: module.GemmTile(*tile)})
        module.load_tuned({})
        results = [module.small_batch_gemm(**given, y=torch.full_like(given["residual"], 9.0)) for _ in range(2)]
        error = float((results[0].double() - want).norm() / want.norm())
        assert error <= BOUNDS[torch.float16]
        assert torch.equal(*results)
        # A row is the same whatever lies beside it.
        one = given | {"x": given["x"][1:2], "residual": given["residual"][1:2]}
        patch.setitem(module._tiles, module.GemmShape(n_out, width, 8, gated), module.GemmTile(*tile))
        alone = module.small_batch_gemm(**one, y=torch.empty_like(one["residual"]))
        torch.testing.assert_close(alone, results[0][1:2], rtol=4e-3, atol=4e-3)
    module.load_tuned({})


def test_launches_of_graphs_count_programs_by_counters_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("caramba.kernels.triton.small_batch_gemm")
    for name in ("_counters", "_captured"):
        monkeypatch.setattr(module, name, {})
    monkeypatch.setattr(module, "CAPTURED", 24)

    class Captured(Tensor):
        is_cuda = True

    on_gpu = torch.zeros(1).as_subclass(Captured)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert module._counts(on_gpu, 5) is None, "there were none before the graph"
    counts = module._counts(torch.zeros(1), 5)
    assert counts is not None
    assert module._counts(torch.zeros(1), 7) is counts
    places = [module._counts(on_gpu, tiles) for tiles in (5, 1, 13)]
    assert places[2] is None, "too few are left"
    held = [place.data_ptr() for place in places[:2]]
    assert held[1] - held[0] == 8 * 4, "each launch has its own, at sixteen bytes"
    assert counts.data_ptr() not in held


def test_tiles_fit_the_device() -> None:
    module = importlib.import_module("caramba.kernels.triton.small_batch_gemm")
    tile = module.GemmTile(64, 128, 1, 4, 4, 6)
    assert module.fitting(tile, 64, module.SHARED_BYTES) == tile
    assert module.fitting(tile, 64, 99 * 1024).stages == 3, "32 KiB a stage"
    assert module.fitting(tile, 64, 48 * 1024).stages == 2
    for block_m, kinds in module.FASTEST.items():
        assert all(module.fitting(one, block_m, module.SHARED_BYTES) == one for one in kinds)


@pytest.mark.skipif(INTERPRETED, reason="graphs are captured on a GPU")
@pytest.mark.parametrize("rows", [2, 8, 32, 64])
def test_graphs_replay_what_calls_make(rows: int) -> None:
    launched = importlib.import_module("caramba.kernels.triton.small_batch_linear").small_batch_linear
    first = {
        name: value.cuda() if isinstance(value, Tensor) else value
        for name, value in arguments(rows, 8192, 2048, gated=False, dtype=torch.bfloat16).items()
    }
    second = first | {"norm": None, "eps": None, "weight": first["weight"][:, :2048].contiguous()}

    def chain(x: Tensor) -> Tensor:
        y = launched(**first | {"x": x})
        for _ in range(8):
            y = launched(**second | {"x": y, "residual": y})
            y = y / y.norm(dim=-1, keepdim=True) if _ == 3 else y
        return y

    x = first["x"].clone()
    want = chain(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(x)
    for _ in range(5):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)


@pytest.mark.skipif(not HAS_GPU, reason="graphs are of a GPU")
def test_graphs_beside_each_other_count_apart() -> None:
    """Programs that share a width count themselves: two graphs, replayed on two streams at once, by counters of each."""
    module = importlib.import_module("caramba.kernels.triton.small_batch_linear")
    given = [
        {name: value.cuda() if isinstance(value, Tensor) else value for name, value in one.items()}
        for one in (arguments(32, 2048, 2048, gated=False, dtype=torch.bfloat16) for _ in range(2))
    ]
    wanted = [module.small_batch_linear(**one) for one in given]
    graphs, results = [], []
    for one in given:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append([module.small_batch_linear(**one) for _ in range(16)])
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(50):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for made, right in zip(results, wanted, strict=True):
        assert all(torch.equal(one, right) for one in made)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_a_product_that_begins_while_the_kernel_ahead_ends_reads_all_that_it_stored() -> None:
    module = importlib.import_module("caramba.kernels.triton.small_batch_linear")
    first, second = (torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) / 45 for _ in range(2))
    x, weight = torch.randn(1, 2048, device="cuda", dtype=torch.bfloat16), first.clone()

    def chain(wait: Callable[[], None]) -> list[Tensor]:
        found = [x]
        for step in range(40):
            # By turns another product, a kernel of torch's and a copy lie right ahead.
            if step % 3 == 1:
                torch.mul(second if step % 2 else first, 1.0, out=weight)
            elif step % 3 == 2:
                weight.copy_(first)
            wait()
            found.append(module.small_batch_linear(found[-1], weight, None, None, found[-1], None, 1e-5, False))
            wait()
        return found

    wanted = chain(torch.cuda.synchronize)
    for _ in range(20):
        for got, want in zip(chain(lambda: None), wanted, strict=True):
            assert torch.equal(got, want)
    weight.copy_(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(lambda: None)
    for _ in range(20):
        for y in found[1:]:
            y.fill_(float("nan"))
        weight.copy_(first)
        graph.replay()
        for got, want in zip(found, wanted, strict=True):
            assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_a_product_reads_what_the_kernel_ahead_stores_last() -> None:
    from tests.ops.late_writer import skip_where_nothing_begins_early, store_late

    skip_where_nothing_begins_early("cuda")
    module = importlib.import_module("caramba.kernels.triton.small_batch_linear")
    weight = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) / 45
    first = torch.randn(1, 2048, device="cuda", dtype=torch.bfloat16)
    x = torch.zeros_like(first)

    def chain(wait: Callable[[], None]) -> list[Tensor]:
        found = [first]
        for _ in range(20):
            store_late(x, found[-1])
            wait()
            found.append(module.small_batch_linear(x, weight, None, None, x, None, 1e-5, False))
            wait()
        return found

    wanted = chain(torch.cuda.synchronize)
    assert all(y.isfinite().all() for y in wanted)
    assert not any(torch.equal(one, other) for one, other in itertools.pairwise(wanted)), "old rows would not show"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(lambda: None)
    for _ in range(20):
        for y in (x, *found[1:]):
            y.fill_(float("nan"))
        graph.replay()
        for got, want in zip(found, wanted, strict=True):
            assert torch.equal(got, want)
