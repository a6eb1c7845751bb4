"""Launches of CUDA C++ kernels, in the place of a Triton kernel's `Launch`."""

from __future__ import annotations

import ctypes
import functools
import threading
import warnings
from collections.abc import Mapping, Sequence

import caramba.kernels.cuda.driver as cuda
import caramba.kernels.cuda.nvrtc as nvrtc
import torch
from caramba.kernels.triton.launch import ALIGNMENT, Launch
from torch import Tensor


class CudaLaunch:
    """A kernel of a source of this folder on a grid, with the macros that it is compiled with.

    Its arguments are the addresses of tensors and then `scalars`, of 32 bits. It reads vectors of 16 bytes: tensors of
    which one begins elsewhere go to `otherwise`, which computes the same. `features` is added to the architecture's
    name: "a" for instructions that it alone has. `early`: it may begin while the kernel ahead ends, and waits for that.
    """

    def __init__(
        self,
        source: str,
        name: str,
        macros: Mapping[str, object],
        grid: tuple[int, int],
        threads: int,
        shared_bytes: int,
        n_tensors: int,
        scalars: Sequence[int],
        otherwise: Launch | None,
        features: str = "",
        early: bool = False,
    ) -> None:
        self.source, self.name, self.macros, self.otherwise = source, name, dict(macros), otherwise
        self.shared_bytes, self.features = shared_bytes, features
        self.config = cuda.LaunchConfig(*grid, 1, threads, 1, 1, shared_bytes, None, None, 0)
        self.attribute = cuda.LaunchAttribute(cuda.BEGINS_EARLY, 1)
        if early:
            self.config.attributes, self.config.n_attributes = ctypes.addressof(self.attribute), 1
        # One piece of memory, as a structure has them: pointers, then numbers of half their size.
        self.arguments = (ctypes.c_uint64 * (n_tensors + (len(scalars) + 1) // 2))()
        self.scalars = (ctypes.c_int32 * len(scalars)).from_buffer(self.arguments, 8 * n_tensors)
        self.scalars[:] = list(scalars)
        self.n_tensors = n_tensors
        self.size = ctypes.c_size_t(8 * n_tensors + 4 * len(scalars))
        self.extra = (ctypes.c_void_p * 5)(
            cuda.ARGUMENTS_AT,
            ctypes.addressof(self.arguments),
            cuda.ARGUMENTS_SIZE,
            ctypes.addressof(self.size),
            None,
        )
        self.config_at, self.extra_at = ctypes.addressof(self.config), ctypes.addressof(self.extra)
        self.lock = threading.Lock()  # two threads may launch what has one place for its arguments
        self.made: int | None = None
        """The loaded kernel, once it is."""
        self.is_refused = False
        """Whether it could not be had, so that `otherwise` runs."""

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch on tensors, which are the kernel's first arguments, on the device of the first of them. One that is
        None, which the first is not, is a null pointer.

        Where the kernel does not compile or load, as by a compiler newer than the driver, `otherwise` runs from then
        on, with a warning that has the reason.

        Raises:
            NotCompiled: it does not compile and there is no `otherwise`; the message has the compiler's log.
            DriverError: it cannot be loaded and there is no `otherwise`, or a launch failed.
        """
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        if self.is_refused or any(address % ALIGNMENT for address in addresses):
            self._other()(*tensors)
            return
        first = tensors[0]
        assert first is not None
        with torch.cuda.device_of(first):
            if self.made is None and not self._load(first.get_device()):
                self._other()(*tensors)
                return
            stream = torch._C._cuda_getCurrentRawStream(first.get_device())
            self.at(stream, 0, addresses)

    def at(self, stream: int, place: int, addresses: Sequence[int]) -> bool:
        """Launch on a stream of the current device and tensors by their addresses.

        `place` are the bits of `misaligned_args`. Return False where no kernel is loaded for these yet.
        """
        if place or self.is_refused:
            return self._other().at(stream, place, addresses)
        if self.made is None:
            return False
        launch = cuda.driver().cuLaunchKernelEx
        with self.lock:
            self.arguments[: self.n_tensors] = addresses
            self.config.stream = stream
            status = launch(self.config_at, self.made, None, self.extra_at)
            if status == cuda.NO_CONTEXT:
                cuda.make_current(torch.cuda.current_device())
                status = launch(self.config_at, self.made, None, self.extra_at)
        if status:
            cuda.check(status, f"{self.name}: cuLaunchKernelEx")
        return True

    def _load(self, device: int) -> bool:
        try:
            code = nvrtc.compile_source(self.source, self.macros, arch(device) + self.features)
            self.made = cuda.function(code, self.name, device, self.shared_bytes).value
        except (nvrtc.NotCompiled, cuda.DriverError) as error:
            if self.otherwise is None:
                raise
            self.is_refused = True
            warnings.warn(
                f"{self.name} in CUDA C++ is not to be had, Triton's kernel runs in its place: {error}",
                stacklevel=3,
            )
        return self.made is not None

    def _other(self) -> Launch:
        if self.otherwise is None:
            raise ValueError(f"{self.name}: a tensor begins at no multiple of {ALIGNMENT} bytes")
        return self.otherwise


@functools.cache
def arch(device: int) -> str:
    """Return how NVRTC names a device's architecture."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
