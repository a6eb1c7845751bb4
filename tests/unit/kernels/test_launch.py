"""Launches that remember the compiled kernel: which call goes through Triton, and which straight to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from caramba.kernels.triton import launch as launch_module
from caramba.kernels.triton.launch import MOST, Launch, Launches, misaligned_args, raw_launcher


class Compiled:
    """Stands for what Triton returns of a launch: a compiled kernel, which is given a grid and all arguments."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def run(self, *args: Any) -> None:
        self.calls.append(args)


class Kernel:
    """Stands for a kernel of two tensors, a live number, a scalar and two constants."""

    arg_names = ("x", "y", "rate", "n", "SECOND", "FIRST")

    def __init__(self) -> None:
        self.made, self.compiled = 0, Compiled()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **constants: Any) -> Compiled:
            self.made += 1
            return self.compiled

        return run


def test_a_second_launch_on_tensors_aligned_alike_goes_to_the_compiled_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 5))
    monkeypatch.setattr(launch_module, "driver", stream)
    kernel, x = Kernel(), torch.zeros(64)
    launch = Launch(kernel, (3,), [7], {"FIRST": 1, "SECOND": 2}, num_warps=4)
    launch(x[1:], None, live=(0.5,))
    launch(x, None, live=(0.5,))
    assert (kernel.made, kernel.compiled.calls) == (2, []), "a kernel for each alignment"
    launch(x, None, live=(0.25,))
    assert kernel.made == 2
    (call,) = kernel.compiled.calls
    assert call[:9] == (3, 1, 1, 5, "function", "metadata", None, None, None)
    assert call[9:] == (x.data_ptr(), None, 0.25, 7, 2, 1), "constants in the kernel's order"
    launch(x[1:], None, live=(0.5,))
    assert (kernel.made, len(kernel.compiled.calls)) == (2, 2)


def test_a_profiler_that_asks_for_launches_gets_them_from_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = Kernel(), torch.zeros(64)
    launch = Launch(kernel, (3,), [7], {"FIRST": 1, "SECOND": 2})
    launch(x, None)
    monkeypatch.setattr(launch_module.knobs.runtime, "launch_enter_hook", lambda metadata: None)
    launch(x, None)
    assert (kernel.made, kernel.compiled.calls) == (2, [])


def test_launches_are_forgotten_when_there_are_many() -> None:
    launches = Launches(Kernel())
    for key in range(MOST + 1):
        launches.add(key, (1,), (key,))
    assert len(launches.made) == MOST // 2 + 1
    assert launches.get(0) is None
    assert launches.get(MOST) is not None


def test_the_way_around_tritons_own_ends_in_the_same_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the version of Triton that is installed: its launcher, without a device to build it on, and `raw_launcher`."""
    nvidia = pytest.importorskip("triton.backends.nvidia.driver")
    calls: list[tuple[Any, ...]] = []
    launcher: Any = object.__new__(nvidia.CudaLauncher)
    launcher.launch = lambda *args: calls.append(args)
    launcher.global_scratch_size = launcher.profile_scratch_size = 0
    launcher.global_scratch_align = launcher.profile_scratch_align = launcher.num_ctas = 1
    launcher.launch_cooperative_grid, launcher.launch_pdl = False, True
    launcher.arg_annotations, launcher.kernel_signature = "annotations", "signature"
    made = SimpleNamespace(run=launcher, function=99, packed_metadata=(4, 1, 0))
    run, before, is_packed = raw_launcher(made)
    assert run is launcher.launch, "this version's way is not known: see `raw_launcher`"
    launcher(3, 1, 1, 5, 99, (4, 1, 0), None, None, None, 16, 32, 7)
    rest = (16, 32, 7)
    run(3, 1, 1, 5, *before, *((rest,) if is_packed else rest))
    assert len(calls) == 2
    assert calls[0] == calls[1]
    launcher.global_scratch_size = 64
    assert raw_launcher(made)[0] is launcher, "Triton allocates what a kernel needs beside its arguments"
    launcher.global_scratch_size = 0
    monkeypatch.setattr(launch_module.triton, "__version__", "3.99.0")
    assert raw_launcher(made)[0] is launcher


def test_a_tensor_beside_another_is_of_the_layout_that_was_asked_for() -> None:
    x = torch.zeros(3)
    for stream in (None, 0):
        made = launch_module.empty(x, stream, (2, 3), (4, 1), torch.bfloat16)
        assert (made.shape, made.stride(), made.dtype) == ((2, 3), (4, 1), torch.bfloat16)
        assert made.device == x.device


def test_what_is_askew_has_a_bit_each() -> None:
    assert misaligned_args([16, None, 8, 0, 20]) == 0b10100
