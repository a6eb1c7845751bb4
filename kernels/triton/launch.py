"""Launches of a kernel whose arguments, but for the tensors, stay the same from one call to the next."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

MOST = 512  # launches of a kernel that are remembered
ALIGNMENT = 16  # bytes: what a kernel is compiled for when every tensor begins at a multiple of it


class Launch:
    """A kernel on a grid, with its scalars and constants.

    Triton looks at every argument of every launch to see which compiled kernel it needs, which takes longer than the
    launch. Here that is done once: a later call passes its tensors to the kernel that the first one was given. They
    must be of the same dtypes and device as the first call's; where they lie is checked.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        scalars: Sequence[Any],
        constants: dict[str, Any],
        **options: int,
    ) -> None:
        self.kernel, self.options = kernel, options
        self.grid = (*grid, 1, 1)[:3]
        self.scalars, self.constants = tuple(scalars), constants
        # In the kernel's order, which a compiled one takes them in.
        self.values = (*scalars, *(constants[name] for name in kernel.arg_names if name in constants))
        self.ready: Callable[..., None] | None = None

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch on tensors, which are the kernel's first arguments, on the device of the first of them.

        One that is None at the first call is None at all.
        """
        assert tensors[0] is not None
        aligned = is_aligned(tensors)
        if aligned and self.ready is not None and is_current(tensors[0]):
            self.ready(*tensors, *self.values)
            return
        with torch.cuda.device_of(tensors[0]):
            made = self.kernel[self.grid](*tensors, *self.scalars, **self.constants, **self.options)
        if aligned and made is not None:  # the interpreter makes nothing
            self.ready = made[self.grid]


class Launches:
    """The launches of a kernel by what they depend on, which their users say; the oldest half goes at `MOST`."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.made: dict[Hashable, Launch] = {}

    def get(self, key: Hashable) -> Launch | None:
        """Return the launch of a key, if there is one."""
        return self.made.get(key)

    def add(
        self, key: Hashable, grid: tuple[int, ...], scalars: Sequence[Any], *constants: Any, **options: int
    ) -> Launch:
        """Make the launch of a key; `constants` follow the scalars in the kernel's order."""
        if len(self.made) >= MOST:
            for old in list(self.made)[: MOST // 2]:
                del self.made[old]
        launch = Launch(self.kernel, grid, (*scalars, *constants), {}, **options)
        self.made[key] = launch
        return launch


def is_aligned(tensors: Sequence[Tensor | None]) -> bool:
    """Whether all begin at a multiple of `ALIGNMENT` bytes."""
    places = 0
    for x in tensors:
        if x is not None:
            places |= x.data_ptr()
    return places % ALIGNMENT == 0


def dtype_of(x: Tensor | None) -> torch.dtype | None:
    """Return the dtype of a tensor that may not be there."""
    return None if x is None else x.dtype


def form(x: Tensor) -> tuple[Any, ...]:
    """Return all that a launch depends on of a tensor, but for where it lies."""
    return x.shape, x.stride(), x.dtype, x.get_device()


def is_current(x: Tensor) -> bool:
    """Whether kernels on x may be launched without changing the current device, which takes microseconds."""
    return not x.is_cuda or x.get_device() == torch.cuda.current_device()
