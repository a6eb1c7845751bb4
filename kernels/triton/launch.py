"""Launches of a kernel whose arguments, but for the tensors, stay the same from one call to the next."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from triton import knobs
from triton.runtime import driver

MOST = 512  # launches of a kernel that are remembered
ALIGNMENT = 16  # bytes: a kernel is compiled for whether a tensor begins at a multiple of it
INTERPRETED = knobs.runtime.interpret


def is_watched() -> bool:
    """Whether a profiler of Triton asks to be told of launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def stream_of(x: Tensor) -> int | None:
    """Return the stream on which a compiled kernel can be launched on x straight away.

    It is None where Triton has to launch: it interprets, it tells a profiler, or x is on another device than the
    current one.
    """
    if INTERPRETED or is_watched():
        return None
    device = x.get_device()
    if device >= 0 and device != torch._C._cuda_getDevice():
        return None
    active: Any = driver.active
    return active.get_current_stream(device)


def empty(
    x: Tensor, stream: int | None, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return a tensor beside x, whose `stream_of` tells whether that is on the current device.

    There it is made as compiled graphs make theirs, in a third of the time.
    """
    if stream is None:
        return x.new_empty_strided(shape, strides, dtype=dtype)
    guards: Any = torch._C._dynamo.guards
    make = guards._empty_strided_cuda if x.is_cuda else guards._empty_strided_cpu
    return make(shape, strides, dtype)


def askew(addresses: Sequence[int | None]) -> int:
    """Return which addresses are not aligned, a bit each; None is."""
    return sum(1 << i for i, address in enumerate(addresses) if address and address % ALIGNMENT)


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
        self.made: dict[int, tuple[Any, Any, Any]] = {}
        """How to launch the compiled kernel, the kernel, and what Triton says of it, by which tensors are not aligned."""

    def __call__(self, *tensors: Tensor | None, live: tuple[Any, ...] = ()) -> None:
        """Launch on tensors, which are the kernel's first arguments, on the device of the first of them.

        One that is None at the first call is None at all. `live` are scalars between the tensors and the others that
        change from call to call, of a kind that no kernel is compiled for: floats, or what is not specialised.
        """
        first = tensors[0]
        assert first is not None
        addresses: list[int | None] = []
        together = 0
        for x in tensors:
            if x is None:
                addresses.append(None)
            else:
                address = x.data_ptr()
                together |= address
                addresses.append(address)
        place = askew(addresses) if together % ALIGNMENT else 0
        stream = stream_of(first) if place in self.made else None
        if stream is not None:
            self._run(place, stream, addresses, live)
            return
        with torch.cuda.device_of(first):
            made = self.kernel[self.grid](*tensors, *live, *self.scalars, **self.constants, **self.options)
        if made is not None:  # the interpreter makes nothing
            self.made[place] = made.run, made.function, made.packed_metadata

    def at(self, stream: int, addresses: Sequence[int]) -> bool:
        """Launch on tensors that lie at these addresses, in a `stream_of` them; False where no kernel is compiled yet."""
        place = askew(addresses) if functools.reduce(int.__or__, addresses) % ALIGNMENT else 0
        if place not in self.made:
            return False
        self._run(place, stream, addresses, ())
        return True

    def _run(self, place: int, stream: int, addresses: Sequence[int | None], live: tuple[Any, ...]) -> None:
        # Addresses in place of tensors spare a question to the driver each.
        run, function, metadata = self.made[place]
        run(
            *self.grid, stream, function, metadata, None, None, None, *addresses, *live, *self.values
        )  # fmt: skip


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
