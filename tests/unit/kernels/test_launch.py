"""Launches that remember the compiled kernel: which call goes through Triton, and which straight to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from caramba.kernels.triton import launch as launch_module
from caramba.kernels.triton.forms import form
from caramba.kernels.triton.launch import MOST, Launch, Launches


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


def test_a_form_is_all_but_the_place() -> None:
    x = torch.zeros(4, 6)
    assert form(x) == form(torch.ones(4, 6))
    assert len({form(y) for y in (x, x.T, x[:3], x.double())}) == 4
