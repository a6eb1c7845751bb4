"""Launches of a kernel whose arguments, but for the tensors, stay the same from one call to the next."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import guards

import triton
from triton import knobs
from triton.runtime import driver

MOST = 512  # launches of a kernel that are remembered
ALIGNMENT = 16  # bytes: a kernel is compiled for whether a tensor begins at a multiple of it
INTERPRETED = knobs.runtime.interpret
_made: Any = guards  # its declaration lacks these functions
_on_cuda, _on_cpu = _made._empty_strided_cuda, _made._empty_strided_cpu


def has_launch_hook() -> bool:
    """True if a profiler of Triton has installed launch hooks."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def stream_of(x: Tensor) -> int | None:
    """Return the stream on which a compiled kernel can be launched on x straight away.

    It is None where Triton has to launch: it interprets, it tells a profiler, or x is on another device than the
    current one.
    """
    if INTERPRETED or has_launch_hook():
        return None
    device = x.get_device()
    if device >= 0 and device != torch._C._cuda_getDevice():
        return None
    active: Any = driver.active
    return active.get_current_stream(device)


def empty(x: Tensor, stream: int | None, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate a tensor on x's device; x's `stream_of` tells whether that is the current device.

    There it is made as compiled graphs make theirs, in a third of the time.
    """
    if stream is None:
        return x.new_empty_strided(shape, strides, dtype=dtype)
    return (_on_cuda if x.is_cuda else _on_cpu)(shape, strides, dtype)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(1, size)
    return tuple(reversed(strides))


def raw_launcher(made: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """Return what launches a compiled kernel, what it takes between stream and arguments, and whether those are a tuple.

    Triton's own path to the function that launches takes as long as that function: it asks whether the kernel needs
    memory of its own, and passes all arguments on. For versions whose function is known it is asked here, once.
    """
    run, no_hooks = made.run, (None, None, None)
    known = type(run).__name__ == "CudaLauncher" and triton.__version__ in ("3.6.0", "3.7.1")
    if not known or run.global_scratch_size or run.profile_scratch_size:
        return run, (made.function, made.packed_metadata, *no_hooks), False
    flags = made.function, run.launch_cooperative_grid, run.launch_pdl
    no_scratch = None, None
    if triton.__version__ == "3.6.0":
        return run.launch, (*flags, *no_scratch, made.packed_metadata, *no_hooks), False
    how = run.arg_annotations, run.kernel_signature
    return run.launch, (*flags, made.packed_metadata, *no_hooks, *no_scratch, *how), True


def misaligned_args(addresses: Sequence[int | None]) -> int:
    """Return which addresses are not aligned, a bit each; None is."""
    return sum(1 << i for i, address in enumerate(addresses) if address and address % ALIGNMENT)


@functools.cache
def arch(device: torch.device) -> str:
    """Return how tables name a device."""
    if device.type != "cuda":
        return "interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


class Launch:
    """A kernel on a grid, with its scalars and constants.

    Triton looks at every argument of every launch to see which compiled kernel it needs, which takes longer than the
    launch. Here that is done once: a later call passes its tensors to the kernel that the first one was given. They
    must be of the same dtypes and device as the first call's; their alignment is checked.
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
        self.made: dict[int, tuple[Any, tuple[Any, ...], bool]] = {}
        """The compiled kernel, as `raw_launcher` has it, by which tensors are not aligned."""

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
        place = misaligned_args(addresses) if together % ALIGNMENT else 0
        stream = stream_of(first) if place in self.made else None
        if stream is not None and self.at(stream, place, (*addresses, *live)):
            return
        with torch.cuda.device_of(first):
            made = self.kernel[self.grid](*tensors, *live, *self.scalars, **self.constants, **self.options)
        if made is not None:  # the interpreter makes nothing
            self.made[place] = raw_launcher(made)

    def at(self, stream: int, place: int, addresses: Sequence[Any]) -> bool:
        """Launch on a stream (`stream_of`) and tensors by their addresses; `place` are the bits of `misaligned_args`.

        Return False where no kernel is compiled for that yet. Addresses spare a question to the driver each.
        """
        made = self.made.get(place)
        if made is None:
            return False
        run, before, is_packed = made
        if is_packed:
            run(*self.grid, stream, *before, (*addresses, *self.values))
        else:
            run(*self.grid, stream, *before, *addresses, *self.values)
        return True


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

    def clear(self) -> None:
        """Forget all launches."""
        self.made.clear()


def power_of_2(n: int) -> int:
    """Return the next power of two; Triton's own is one for its compiler too, at several microseconds a call."""
    return 1 << (n - 1).bit_length()
