"""Launches of a kernel whose arguments, but for the tensors, stay the same from one call to the next."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from triton import knobs
from triton.runtime import driver

MOST = 512  # launches of a kernel that are remembered
ALIGNMENT = 16  # bytes: a kernel is compiled for whether a tensor begins at a multiple of it


def is_watched() -> bool:
    """Whether a profiler of Triton asks to be told of launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


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
        self.made: dict[int, Any] = {}
        """The compiled kernel by which tensors are not aligned, a bit each."""

    def __call__(self, *tensors: Tensor | None, live: tuple[Any, ...] = ()) -> None:
        """Launch on tensors, which are the kernel's first arguments, on the device of the first of them.

        One that is None at the first call is None at all. `live` are scalars between the tensors and the others that
        change from call to call, of a kind that no kernel is compiled for: floats, or what is not specialised.
        """
        first = tensors[0]
        assert first is not None
        addresses: list[int | None] = []
        askew, bit = 0, 1
        for x in tensors:
            if x is None:
                addresses.append(None)
            else:
                address = x.data_ptr()
                addresses.append(address)
                if address % ALIGNMENT:
                    askew |= bit
            bit += bit
        made = self.made.get(askew)
        if made is not None and not is_watched():
            device = first.get_device()
            if device < 0 or device == torch.cuda.current_device():
                # Addresses in place of tensors spare a question to the driver each.
                active: Any = driver.active
                made.run(
                    *self.grid,
                    active.get_current_stream(device),
                    made.function,
                    made.packed_metadata,
                    *(None, None, None),
                    *addresses,
                    *live,
                    *self.values,
                )
                return
        with torch.cuda.device_of(first):
            made = self.kernel[self.grid](*tensors, *live, *self.scalars, **self.constants, **self.options)
        if made is not None:  # the interpreter makes nothing
            self.made[askew] = made


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


def dtype_of(x: Tensor | None) -> torch.dtype | None:
    """Return the dtype of a tensor that may not be there."""
    return None if x is None else x.dtype


def form(x: Tensor) -> tuple[Any, ...]:
    """Return all that a launch depends on of a tensor, but for where it lies."""
    return x.shape, x.stride(), x.dtype, x.get_device()
