"""CUDA's driver: loads machine code on a device, and launches it."""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

NO_CONTEXT = 201
"""A thread that has not used CUDA yet."""
ARGUMENTS_AT, ARGUMENTS_SIZE = 1, 2
"""Options of cuLaunchKernel: the address of the packed arguments, and the address of their size in bytes."""
_MOST_SHARED, _CARVEOUT = 8, 9  # attributes of a function
_RELAXED = 2  # mode of capture
BEGINS_EARLY = 6
"""Attribute of a launch: it may begin while the kernel ahead on its stream ends (programmatic stream serialization)."""
_loaded: dict[tuple[bytes, str, int], ctypes.c_void_p] = {}
_lock = threading.Lock()


class DriverError(RuntimeError):
    """The driver refused; the message has its reason."""


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig: the grid, a block's threads, shared memory in bytes, the stream, attributes."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z")),
        *((name, ctypes.c_uint) for name in ("block_x", "block_y", "block_z")),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("n_attributes", ctypes.c_uint),
    ]


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: which one, and its value, of which these take a number."""

    _fields_ = [("which", ctypes.c_uint64), ("value", ctypes.c_uint32), ("rest", ctypes.c_uint32 * 15)]


@functools.cache
def driver() -> Any:
    """Load the driver's library, which torch has initialised.

    Raises:
        DriverError: there is none.
    """
    try:
        found = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"no CUDA driver: {error}") from None
    # Pointers go as they are: without types a tuple of them would be looked at at each launch.
    found.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return found


def check(status: int, what: str) -> None:
    """Raise DriverError unless a call of the driver succeeded."""
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise DriverError(f"{what}: {(text.value or b'?').decode()} ({status})")


def make_current(device: int) -> None:
    """Make torch's context of a device this thread's own, which a new thread has none of."""
    context, cuda = ctypes.c_void_p(), driver()
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    try:
        check(cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    finally:
        check(cuda.cuDevicePrimaryCtxRelease_v2(device), "cuDevicePrimaryCtxRelease")


def function(code: bytes, name: str, device: int, shared_bytes: int) -> ctypes.c_void_p:
    """Load a kernel on a device once, with this much dynamic shared memory per block.

    Works during graph capture. A loaded kernel is never unloaded: a graph may launch it at any time.

    Raises:
        DriverError: the code is not for this device, or its blocks cannot have that much.
    """
    with _lock:
        make_current(device)  # attributes too are asked of a context
        found = _loaded.get((code, name, device))
        if found is None:
            found = _loaded[code, name, device] = _load(code, name, device)
        if shared_bytes > 48 * 1024:
            _allow(found, shared_bytes)
    return found


def _load(code: bytes, name: str, device: int) -> ctypes.c_void_p:
    cuda, module, found = driver(), ctypes.c_void_p(), ctypes.c_void_p()
    mode = ctypes.c_int(_RELAXED)
    check(cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode")
    try:
        check(cuda.cuModuleLoadData(ctypes.byref(module), code), f"{name}: cuModuleLoadData")
        check(
            cuda.cuModuleGetFunction(ctypes.byref(found), module, name.encode()),
            f"{name}: cuModuleGetFunction",
        )
    finally:
        check(cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode")
    return found


def _allow(loaded: ctypes.c_void_p, shared_bytes: int) -> None:
    """Raise what a block may have; never lower it, as another launch of the same code may need more."""
    cuda, present = driver(), ctypes.c_int()
    check(cuda.cuFuncGetAttribute(ctypes.byref(present), _MOST_SHARED, loaded), "cuFuncGetAttribute")
    if present.value < shared_bytes:
        what = f"{shared_bytes} bytes of shared memory"
        check(cuda.cuFuncSetAttribute(loaded, _MOST_SHARED, shared_bytes), what)
        check(cuda.cuFuncSetAttribute(loaded, _CARVEOUT, 100), what)
