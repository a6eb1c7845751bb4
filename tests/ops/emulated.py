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
COMPILER = ("g++", "-std=c++20", "-fPIC", "-fno-strict-aliasing")
OPTIONS = ("-Og", "-Wno-unknown-pragmas")  # a third of -O2's time; kernels run as fast
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
        held = [argument(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(x) for x in held))
        error = ctypes.create_string_buffer(500)
        if self._run(*grid, threads, shared_bytes, mode, pointers, error, len(error)):
            raise RuntimeError(error.value.decode())


def argument(x: object) -> ctypes.c_int | ctypes.c_void_p | ctypes.Array[ctypes.c_char]:
    """Return an argument of a kernel as memory: an array's address, a number's bytes."""
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
    text = f'#include "{source}"\nEMULATED({name})\n'
    options = (
        *OPTIONS,
        "-Winvalid-pch",
        "-include",
        str(precompile(HEADER, OPTIONS)),
        f"-I{KERNELS}",
        *defines,
    )
    return compile_library(text, options, f"{source.name} with {' '.join(defines)}")


@functools.cache
def precompile(header: Path, options: tuple[str, ...]) -> Path:
    """Return an emulator's header, which g++ reads precompiled: reading the text takes as long as a kernel."""
    folder = Path(_folder().name) / hashlib.sha256(repr((header, options)).encode()).hexdigest()[:16]
    folder.mkdir()
    copy = folder / header.name
    copy.write_text(f'#include "{header}"\n', encoding="utf-8")
    subprocess.run([*COMPILER, *options, "-x", "c++-header", str(copy)], check=True)
    return copy


@functools.cache
def compile_library(text: str, options: tuple[str, ...], what: str) -> Path:
    """Compile C++ of a kernel into a shared library for this host, once in this process.

    Raises:
        RuntimeError: the compiler refuses it.
    """
    tag = hashlib.sha256(repr((text, options)).encode()).hexdigest()[:16]
    main, library = (Path(_folder().name) / f"{tag}.{suffix}" for suffix in ("cpp", "so"))
    main.write_text(text, encoding="utf-8")
    command = [*COMPILER, "-shared", *options, str(main), "-o", str(library)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise RuntimeError(f"g++ refuses {what}:\n{made.stderr[-4000:]}")
    return library
