"""CUDA kernels of kernels/cuda on this host: g++ compiles them with the names of tests/ops/warp_emulator."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
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
WEEK_S = 7 * 24 * 3600
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
def _folder() -> Path:
    """Return where compiled kernels stay for other processes and later runs. Another source or compiler has another
    folder; what was not used for a week is removed."""
    root = Path(tempfile.gettempdir()) / f"caramba-emulated-{os.getuid()}"
    version = subprocess.run([COMPILER[0], "--version"], capture_output=True, check=True).stdout
    digest = hashlib.sha256(version + repr(COMPILER).encode())
    here = Path(__file__).parent
    for folder in (KERNELS, here / "warp_emulator", here / "metal_emulator"):
        for file in sorted(path for path in folder.iterdir() if path.is_file()):
            digest.update(file.read_bytes())
    folder = root / digest.hexdigest()[:16]
    root.mkdir(mode=0o700, exist_ok=True)
    if (found := root.stat()).st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{root}: others can write there, and libraries of it are loaded; remove it")
    folder.mkdir(exist_ok=True)
    os.utime(folder)
    for other in root.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            if time.time() - other.stat().st_mtime > WEEK_S:
                shutil.rmtree(other, ignore_errors=True)
    return folder


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
    folder = _folder() / hashlib.sha256(repr((header, options)).encode()).hexdigest()[:16]
    copy, made = folder / header.name, folder / f"{header.name}.gch"
    if not made.exists():
        folder.mkdir(exist_ok=True)
        copy.write_text(f'#include "{header}"\n', encoding="utf-8")
        own = made.with_suffix(f".{os.getpid()}")
        subprocess.run([*COMPILER, *options, "-x", "c++-header", str(copy), "-o", str(own)], check=True)
        own.replace(made)
    return copy


@functools.cache
def compile_library(text: str, options: tuple[str, ...], what: str) -> Path:
    """Compile C++ of a kernel into a shared library for this host, where no process did before.

    Raises:
        RuntimeError: the compiler refuses it.
    """
    tag = hashlib.sha256(repr((text, options)).encode()).hexdigest()[:16]
    library = _folder() / f"{tag}.so"
    if library.exists():
        return library
    main, own = (_folder() / f"{tag}.{os.getpid()}.{suffix}" for suffix in ("cpp", "so"))
    main.write_text(text, encoding="utf-8")
    command = [*COMPILER, "-shared", *options, str(main), "-o", str(own)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    main.unlink()
    if made.returncode:
        raise RuntimeError(f"g++ refuses {what}:\n{made.stderr[-4000:]}")
    own.replace(library)
    return library
