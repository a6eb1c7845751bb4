"""Launches that remember the compiled kernel: which call goes through Triton, and which straight to it."""

from __future__ import annotations

from typing import Any

import torch
from caramba.kernels.triton.launch import MOST, Launch, Launches, form


class Compiled:
    """Stands for what Triton returns of a launch: a compiled kernel, which is given a grid and then all arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.calls.append((grid, *args))


class Kernel:
    """Stands for a kernel of two tensors, a scalar and two constants."""

    arg_names = ("x", "y", "n", "SECOND", "FIRST")

    def __init__(self) -> None:
        self.made, self.compiled = 0, Compiled()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **constants: Any) -> Compiled:
            self.made += 1
            return self.compiled

        return run


def test_a_second_launch_on_aligned_tensors_goes_to_the_compiled_kernel() -> None:
    kernel, x = Kernel(), torch.zeros(64)
    launch = Launch(kernel, (3,), [7], {"FIRST": 1, "SECOND": 2}, num_warps=4)
    launch(x[1:], None)
    launch(x, None)
    assert (kernel.made, kernel.compiled.calls) == (2, [])
    launch(x, None)
    assert kernel.made == 2
    (call,) = kernel.compiled.calls
    assert call[0] == (3, 1, 1)
    assert call[2:] == (None, 7, 2, 1), "constants in the kernel's order"
    launch(x[1:], None)
    assert kernel.made == 3


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
