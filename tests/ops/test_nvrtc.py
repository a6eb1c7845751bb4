"""CUDA sources are compiled once by NVRTC, where it is, and launched with their arguments in order."""

from __future__ import annotations

import ctypes
import importlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.ops.emulated import EmulatedKernel, needs_compiler

pytest.importorskip("triton")
SOURCE = Path(__file__).parent / "warp_emulator" / "each_instruction.cu"


def module(name: str) -> ModuleType:
    return importlib.import_module(f"caramba.kernels.cuda.{name}")


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_nvrtc = pytest.mark.skipif(module("nvrtc").version() is None, reason="needs NVRTC")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module("nvrtc"), "_folder", None)
    monkeypatch.setattr(module("nvrtc"), "_compiled", {})
    module("nvrtc").keep_in(tmp_path / "cubins")
    return tmp_path / "cubins"


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_instructions_compile(arch: str, folder: Path) -> None:
    code = module("nvrtc").compile_source(str(SOURCE), {}, arch)
    assert code.startswith(b"\x7fELF")
    assert b"product_f16" in code


@needs_nvrtc
def test_what_does_not_compile_is_told_with_the_compilers_words(folder: Path) -> None:
    with pytest.raises(module("nvrtc").NotCompiled, match=r"(?s)each_instruction.cu for sm_90 with -Dlane_id=.*error"):
        module("nvrtc").compile_source(str(SOURCE), {"lane_id": "!"}, "sm_90")
    assert not folder.exists()


def test_without_nvrtc_there_is_no_version_and_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvrtc = module("nvrtc")
    nvrtc.library.cache_clear(), nvrtc.version.cache_clear()
    monkeypatch.setattr(nvrtc, "_places", lambda: iter(["/nowhere/libnvrtc.so.13"]))
    try:
        assert nvrtc.version() is None
        with pytest.raises(nvrtc.NotCompiled, match="pip install nvidia-cuda-nvrtc"):
            nvrtc.library()
    finally:
        nvrtc.library.cache_clear(), nvrtc.version.cache_clear()


def test_code_is_compiled_once_for_all_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc, made = module("nvrtc"), []

    def compile_(source: str, defines: tuple[str, ...], arch: str) -> bytes:
        made.append((Path(source).name, defines, arch))
        return f"code {len(made)}".encode()

    monkeypatch.setattr(nvrtc, "_compile", compile_)
    first = nvrtc.compile_source(str(SOURCE), {"B": 2, "A": 1}, "sm_90")
    assert made == [("each_instruction.cu", ("-DA=1", "-DB=2"), "sm_90")]
    assert nvrtc.compile_source(str(SOURCE), {"A": 1, "B": 2}, "sm_90") is first
    nvrtc._compiled.clear()  # as in another process
    assert nvrtc.compile_source(str(SOURCE), {"A": 1, "B": 2}, "sm_90") == first
    assert len(made) == 1
    others = [({"A": 1, "B": 3}, "sm_90"), ({"A": 1, "B": 2}, "sm_100")]
    assert [nvrtc.compile_source(str(SOURCE), macros, arch) for macros, arch in others] == [
        b"code 2",
        b"code 3",
    ]
    assert len(list(folder.iterdir())) == 3


def test_a_folder_that_cannot_be_written_is_told_and_nothing_else(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvrtc = module("nvrtc")
    (tmp_path / "file").write_text("")
    nvrtc.keep_in(tmp_path / "file")
    monkeypatch.setattr(nvrtc, "_compile", lambda *_: b"code")
    with pytest.warns(UserWarning, match="every process compiles kernels again"):
        assert nvrtc.compile_source(str(SOURCE), {}, "sm_90") == b"code"


def test_code_that_cannot_be_kept_or_read_is_compiled_anew_and_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvrtc = module("nvrtc")
    monkeypatch.setattr(nvrtc, "_compile", lambda *_: b"code")
    assert nvrtc.compile_source(str(SOURCE), {}, "sm_90") == b"code"
    (kept,) = folder.iterdir()
    nvrtc._compiled.clear()
    kept.write_bytes(b"")  # of a machine that stopped before the file lay on its disk
    assert nvrtc.compile_source(str(SOURCE), {}, "sm_90") == b"code"
    assert kept.read_bytes() == b"code"
    nvrtc._compiled.clear()
    kept.unlink()
    kept.mkdir()  # read and replaced by nobody, as another user's file
    with pytest.warns(UserWarning, match="every process compiles kernels again"):
        assert nvrtc.compile_source(str(SOURCE), {}, "sm_90") == b"code"
    assert list(folder.iterdir()) == [kept]


class Driver:
    """Keeps what is launched, in place of a GPU's driver."""

    def __init__(self, *statuses: int) -> None:
        self.launched: list[Any] = []
        self.attributes: list[bytes] = []
        self.statuses = list(statuses)

    def cuLaunchKernelEx(self, config_at: int, made: int, arguments: None, extra_at: int) -> int:  # noqa: N802
        config = module("driver").LaunchConfig.from_address(config_at)
        first, at, second, size_at, end = (ctypes.c_void_p * 5).from_address(extra_at)
        assert (first, second, end, arguments) == (1, 2, None, None)
        assert ctypes.c_size_t.from_address(size_at).value == 3 * 8 + 2 * 4
        addresses = list((ctypes.c_uint64 * 3).from_address(at))
        scalars = list((ctypes.c_int32 * 2).from_address(at + 3 * 8))
        sizes = [getattr(config, name) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")]
        if config.n_attributes:
            self.attributes.append(ctypes.string_at(config.attributes, 72 * config.n_attributes))
        self.launched.append((sizes, config.shared_bytes, config.stream, made, addresses, scalars))
        return self.statuses.pop(0) if self.statuses else 0


def launch_on(driver: Driver, monkeypatch: pytest.MonkeyPatch, early: bool = False) -> Any:
    monkeypatch.setattr(module("driver"), "driver", lambda: driver)
    other = SimpleNamespace(at=lambda stream, place, addresses: ("other", stream, place, addresses))
    return module("launch").CudaLaunch("x.cu", "x", {}, (6, 5), 128, 4000, 3, [7, -8], other, early=early)


def test_a_launch_that_may_begin_early_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    for early in (False, True):
        launch = launch_on(driver, monkeypatch, early)
        launch.made = 77
        assert launch.at(9, 0, [16, 32, 48])
    # CUlaunchAttribute: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, padding, and a value of 64 bytes.
    assert driver.attributes == [bytes([6, *[0] * 7, 1, *[0] * 63])]


def test_arguments_of_a_launch_are_where_the_driver_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    launch = launch_on(driver, monkeypatch)
    assert not launch.at(9, 0, [16, 32, 48]), "nothing is loaded yet"
    launch.made = 77
    assert launch.at(9, 0, [16, 1 << 40, 48])
    assert launch.at(10, 0, (0, 32, 64))
    sizes = [6, 5, 1, 128, 1, 1]
    assert driver.launched == [
        (sizes, 4000, 9, 77, [16, 1 << 40, 48], [7, -8]),
        (sizes, 4000, 10, 77, [0, 32, 64], [7, -8]),
    ]
    assert launch.at(9, 2, [16, 8, 48]) == ("other", 9, 2, [16, 8, 48]), "what is not aligned"


def test_a_launch_in_a_new_thread_gets_a_context_and_errors_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(module("driver").NO_CONTEXT, 0, 700)
    launch = launch_on(driver, monkeypatch)
    launch.made, current = 77, []
    monkeypatch.setattr(module("driver"), "make_current", current.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert launch.at(9, 0, [16, 32, 48])
    assert (current, len(driver.launched)) == ([3], 2)

    def told(status: int, what: str) -> None:
        raise module("driver").DriverError(f"{what} {status}")

    monkeypatch.setattr(module("driver"), "check", told)
    with pytest.raises(module("driver").DriverError, match="x: cuLaunchKernelEx 700"):
        launch.at(9, 0, [16, 32, 48])


def test_what_does_not_compile_or_load_is_said_and_triton_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    launches, nvrtc, driver = module("launch"), module("nvrtc"), module("driver")
    ran: list[Any] = []

    class Other:
        def __call__(self, *tensors: torch.Tensor) -> None:
            ran.append(len(tensors))

        def at(self, stream: int, place: int, addresses: Sequence[int]) -> bool:
            ran.append(place)
            return True

    def refuses(error: Exception) -> Callable[..., bytes]:
        def compiled(*_: object) -> bytes:
            raise error

        return compiled

    monkeypatch.setattr(launches, "arch", lambda device: "sm_90")
    x = torch.zeros(16)
    for error in (nvrtc.NotCompiled("no builtins"), driver.DriverError("no kernel image (209)")):
        monkeypatch.setattr(nvrtc, "compile_source", refuses(error))
        launch = launches.CudaLaunch("x.cu", "x", {}, (1, 1), 32, 0, 1, [], Other())
        with pytest.warns(UserWarning, match=f"x in CUDA C.* Triton's kernel runs in its place: {str(error)[:9]}"):
            launch(x)
        launch(x)
        assert launch.at(9, 0, [16])
        alone = launches.CudaLaunch("x.cu", "x", {}, (1, 1), 32, 0, 1, [], None)
        with pytest.raises(type(error)):
            alone(x)
    assert ran == 2 * [1, 1, 0]


def test_a_new_thread_may_ask_for_what_another_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, asked, allowed = module("driver"), [], []

    def current(device: int) -> None:
        asked.append((threading.get_ident(), device))

    def allow(loaded: Any, shared_bytes: int) -> None:
        assert asked[-1] == (threading.get_ident(), 3), "attributes are those of a context"
        allowed.append((loaded, shared_bytes))

    monkeypatch.setattr(driver, "make_current", current)
    monkeypatch.setattr(driver, "_allow", allow)
    monkeypatch.setattr(driver, "_load", lambda code, name, device: (code, name, device))
    monkeypatch.setattr(driver, "_loaded", {})
    for _ in range(2):
        thread = threading.Thread(target=driver.function, args=(b"code", "x", 3, 100_000))
        thread.start()
        thread.join()
    assert allowed == [((b"code", "x", 3), 100_000)] * 2


def on_gpu(name: str, threads: int, shared_bytes: int, n_tensors: int, *scalars: int, grid: int = 1) -> Any:
    launch = module("launch").CudaLaunch
    return launch(str(SOURCE), name, {}, (grid, 1), threads, shared_bytes, n_tensors, scalars, None)


@pytest.mark.gpu
@needs_gpu
@needs_nvrtc
@needs_compiler
def test_a_gpu_does_what_the_emulator_does() -> None:
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 32, (3, 32), dtype=np.uint32)
    # Codes below bfloat16's smallest normal number, times 2^69.
    words[:, 4:6] = [[0x000F0001, 0x00F00010], [0x62006200] * 2, [0x80008000] * 2]
    halves = rng.integers(0, 1 << 16, (4, 8, 8), dtype=np.uint16)
    left, right = (rng.standard_normal(n).astype(np.float16) for n in (256, 128))
    copied = rng.integers(0, 1 << 32, (3, 3, 64, 4), dtype=np.uint32)
    floats = np.linspace(-30, 30, 32, dtype=np.float32)
    cases = {
        "numbers": (32, 0, 1, [np.zeros((20, 32), np.uint32), *words], []),
        "matrices": (32, 8192, 1, [np.zeros(544, np.uint32), halves], []),
        "copies": (64, 60_000, 3, [np.zeros_like(copied), copied], [2]),
        "product_f16": (32, 0, 1, [np.ones((16, 8), np.float32), left, right], []),
        "product_bf16": (32, 0, 1, [np.ones((16, 8), np.float32), left, right], []),
        "functions": (32, 0, 1, [np.zeros((3, 32), np.float32), floats], []),
    }
    for name, (threads, shared, grid, arrays, scalars) in cases.items():
        tensors = [torch.from_numpy(x.view(np.int32 if x.itemsize == 4 else np.int16)).cuda() for x in arrays]
        on_gpu(name, threads, shared, len(tensors), *scalars, grid=grid)(*tensors)
        EmulatedKernel(SOURCE, name)((grid, 1), threads, shared, [*arrays, *scalars])
        found = tensors[0].cpu().numpy().view(arrays[0].dtype)
        if arrays[0].dtype == np.float32:
            np.testing.assert_allclose(found, arrays[0], rtol=1e-5, atol=1e-5, err_msg=name)
        else:
            forms = OF_NUMBERS if name == "numbers" else {}
            differ = _differ(found, arrays[0], forms)
            assert not differ.any(), (name, np.argwhere(differ)[:5], found[differ][:5], arrays[0][differ][:5])


# Rows that "numbers" writes, by the form of what they hold; the others hold integers.
F16_PAIRS, BF16_PAIRS, FLOATS = ((np.uint16, 0x7C00), (np.uint16, 0x7F80), (np.uint32, 0x7F800000))
OF_NUMBERS = {
    **dict.fromkeys((3, 4, 5, 15, 16), F16_PAIRS),
    **dict.fromkeys((6, 17, 19), BF16_PAIRS),
    **dict.fromkeys((7, 8, 9, 10), FLOATS),
}


def _differ(
    found: np.ndarray, wanted: np.ndarray, forms: dict[int, tuple[type[np.unsignedinteger[Any]], int]]
) -> np.ndarray:
    """Where words differ: what is no number has many forms, of which one is as good as another; all else bit by bit.

    `forms` are the type and the infinity of rows that hold numbers.
    """
    differ = found != wanted
    for row, (word, infinity) in forms.items():
        one, other = (np.ascontiguousarray(x[row]).view(word) for x in (found, wanted))
        sign = np.iinfo(word).max >> 1
        are_nan = ((one & sign) > infinity) & ((other & sign) > infinity)
        differ[row] = ((one != other) & ~are_nan).reshape(len(wanted[row]), -1).any(-1)
    return differ


def test_what_is_no_number_equals_any_other_and_nothing_else() -> None:
    halves = [(0x7C01, 0xFFFF), (0x7C00, 0x7FFF), (0x8000, 0x0000), (0x7E00, 0x3C00)]
    words = [(0x7FFFFFFF, 0x7FC00000), (0x7F800000, 0x7FC00000), (0x80000000, 0), (0x7F7FFFFF, 0x7F7FFFFF)]
    found, wanted = (
        np.array([[pair[k] << 16 | 0x3C00 for pair in halves], [pair[k] for pair in words], [7] * 4], np.uint32)
        for k in range(2)
    )
    wanted[2, 1] = 8
    differ = _differ(found, wanted, {0: F16_PAIRS, 1: FLOATS})
    assert differ.tolist() == [
        [False, True, True, True],
        [False, True, True, False],
        [False, True, False, False],
    ]
    bf16 = _differ(found[:1], wanted[:1], {0: BF16_PAIRS})
    assert bf16.tolist() == [[True, True, True, True]], "what float16 holds none of bfloat16 may"
    assert not _differ(np.array([[0x7FFF3F80]], np.uint32), np.array([[0xFFC03F80]], np.uint32), {0: BF16_PAIRS}).any()


@pytest.mark.gpu
@needs_gpu
@needs_nvrtc
def test_a_graph_may_be_captured_before_anything_is_loaded_and_any_thread_may_launch() -> None:
    x = torch.arange(768, dtype=torch.int32, device="cuda")
    out = torch.zeros_like(x)
    launch = on_gpu("copies", 64, 100_000, 2, 2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(out, x)
    assert not out.any()
    graph.replay()
    captured = out.clone()
    out.zero_()
    at = module("launch").torch._C._cuda_getCurrentRawStream(0), 0, [out.data_ptr(), x.data_ptr()]
    worked = []
    thread = threading.Thread(target=lambda: worked.append(launch.at(*at)))
    thread.start()
    thread.join()
    assert worked == [True]
    assert captured.any()
    assert torch.equal(out, captured)
