"""CUDA kernels of kernels/cuda on this host: g++ compiles them with the names of tests/ops/warp_emulator."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

KERNELS = Path(__file__).parents[2] / "kernels" / "cuda"
HEADER = Path(__file__).parent / "warp_emulator" / "warp.h"
EARLY, DESCENDING = 1, 2
"""What a launch's `mode` is made of: copies are done at once, not as late as is allowed; the last lanes run first."""
MODES = (0, EARLY, DESCENDING, EARLY | DESCENDING)

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


class EmulatedKernel:
    """A kernel of a source file, compiled for this host with macros. Needs g++ (`needs_compiler`)."""

    def __init__(self, source: Path, name: str, macros: Mapping[str, object] | None = None) -> None:
        library = ctypes.CDLL(str(_compile(source, name, tuple(sorted((macros or {}).items())))))
        self._run = getattr(library, f"run_{name}")

    def __call__(
        self, grid: tuple[int, int], threads: int, shared_bytes: int, args: Sequence[object], mode: int = 0
    ) -> None:
        """Run every block of the grid. `args` are NumPy arrays (their addresses are passed; None is a null pointer) and
        Python ints (int, 32 bits); NumPy scalars keep their types.

        Raises RuntimeError with the block and lane where lanes do not meet, or shared memory is left.
        """
        held = [_argument(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(x) for x in held))
        error = ctypes.create_string_buffer(500)
        if self._run(*grid, threads, shared_bytes, mode, pointers, error, len(error)):
            raise RuntimeError(error.value.decode())


def _argument(x: object) -> ctypes.c_int | ctypes.c_void_p | ctypes.Array[ctypes.c_char]:
    if x is None:
        return ctypes.c_void_p()
    if isinstance(x, np.ndarray):
        return ctypes.c_void_p(x.ctypes.data)
    if isinstance(x, int):
        return ctypes.c_int(x)
    assert isinstance(x, np.generic)
    return ctypes.create_string_buffer(x.tobytes(), x.nbytes)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="emulated-")


@functools.cache
def _compile(source: Path, name: str, macros: tuple[tuple[str, object], ...]) -> Path:
    defines = [f"-D{key}={value}" for key, value in macros]
    tag = hashlib.sha256(repr((source, name, macros)).encode()).hexdigest()[:16]
    folder = Path(_folder().name)
    main, library = folder / f"{tag}.cpp", folder / f"{tag}.so"
    main.write_text(f'#include "{source}"\nEMULATED({name})\n', encoding="utf-8")
    command = ["g++", "-std=c++20", "-O2", "-shared", "-fPIC", "-fno-strict-aliasing", "-Wno-unknown-pragmas"]
    made = subprocess.run(
        [*command, "-include", str(HEADER), f"-I{KERNELS}", *defines, str(main), "-o", str(library)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode:
        raise RuntimeError(f"g++ refuses {source.name} with {' '.join(defines)}:\n{made.stderr[-4000:]}")
    return library
