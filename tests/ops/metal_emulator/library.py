"""A stand-in for the library of `torch.mps.compile_shader`: its calling convention, on CPU tensors."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from caramba.kernels.metal.library import compiled
from torch import Tensor

from tests.ops.emulated import argument, compile_library, precompile
from tests.ops.metal_emulator.translate import Translated, translate

HERE = Path(__file__).parent
OPTIONS = ("-O0", "-ffp-contract=off", "-Wno-psabi", f"-I{HERE}")
SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1")
CASTS = {"fp16": np.float16, "fp32": np.float32, "int32": np.int32, "int16": np.int16, "int8": np.int8}
WIDEST_GROUP = 1024


class _Argument(ctypes.Structure):
    _fields_ = [
        *(("data", ctypes.c_void_p), ("bytes", ctypes.c_uint64), ("is_number", ctypes.c_int)),
        *(("read", ctypes.c_uint64), ("written", ctypes.c_uint64), ("region", ctypes.c_void_p)),
    ]


@dataclass
class Emulator:
    """How launches run, and what they have moved."""

    seed: int = 0
    options: tuple[str, ...] = ()
    mutate: Callable[[str], str] = str
    libraries: dict[tuple[str, tuple[str, ...]], EmulatedLibrary] = field(default_factory=dict)
    launches: list[str] = field(default_factory=list)
    read: int = 0
    written: int = 0

    def compile_shader(self, source: str) -> EmulatedLibrary:
        """Stand in for `torch.mps.compile_shader`.

        Raises:
            SyntaxError: the source does not compile.
        """
        return self.compile_all([self.mutate(source)])[0]

    def compile_all(self, sources: Sequence[str]) -> list[EmulatedLibrary]:
        """Compile many sources, those that are new by one run of the compiler."""
        new = [one for one in dict.fromkeys(sources) if (one, self.options) not in self.libraries]
        if new:
            made = [translate(source, f"source_{i}") for i, source in enumerate(new)]
            text = "\n".join(one.text for one in made)
            options = (*OPTIONS, *self.options)
            options = (*options, "-Winvalid-pch", "-include", str(precompile(HERE / "metal.h", options)))
            try:
                library = ctypes.CDLL(str(compile_library(text, options, "Metal source")))
            except RuntimeError as error:
                raise SyntaxError(str(error)) from None
            for i, (source, one) in enumerate(zip(new, made, strict=True)):
                self.libraries[source, self.options] = EmulatedLibrary(self, library, f"source_{i}", one)
        return [self.libraries[source, self.options] for source in sources]

    def prepare(self, work: Callable[[], object], *mutations: Callable[[str], str]) -> None:
        """Compile what launches of `work` need by one run of the compiler; they run no kernel here.

        With mutations, their forms of these sources.
        """
        sources: list[str] = []

        def record(source: str) -> mock.Mock:
            sources.append(source)
            return mock.Mock()

        with mock.patch.object(torch.mps, "compile_shader", record):
            compiled.cache_clear()
            work()
            compiled.cache_clear()
        self.compile_all([mutate(source) for mutate in mutations or (str,) for source in sources])

    def use(self, mutate: Callable[[str], str]) -> None:
        """Change what is compiled from now on."""
        self.mutate = mutate
        compiled.cache_clear()

    def forget_bytes(self) -> None:
        """Count from nothing."""
        self.read = self.written = 0
        self.launches.clear()


class EmulatedLibrary:
    """A compiled source; its kernels are attributes."""

    def __init__(self, emulator: Emulator, library: ctypes.CDLL, name: str, made: Translated) -> None:
        for kernel in made.kernels:
            setattr(self, kernel, EmulatedFunction(emulator, kernel, getattr(library, f"{name}_{kernel}")))


class EmulatedFunction:
    """A kernel. Calls take tensors and numbers, `threads` in all and not groups, and `group_size`."""

    def __init__(self, emulator: Emulator, name: str, run: object) -> None:
        self.emulator, self.name = emulator, name
        self._run = run
        self.max_threads_per_threadgroup = WIDEST_GROUP
        self.thread_execution_width = 32

    def __call__(
        self,
        *args: object,
        threads: int | Sequence[int] | None = None,
        group_size: int | Sequence[int] | None = None,
        arg_casts: str | Mapping[int, str] | None = None,
    ) -> None:
        """Run the kernel.

        Raises:
            RuntimeError: an access, a race or a barrier that is wrong, with group and thread.
        """
        given = (_Argument * len(args))()
        held: list[object] = []
        for i, arg in enumerate(args):
            if isinstance(arg, Tensor):
                if threads is None:
                    threads = arg.numel()
                given[i] = _Argument(arg.data_ptr() or None, _extent(arg), 0)
                continue
            cast = arg_casts if isinstance(arg_casts, str) else (arg_casts or {}).get(i)
            number = _number(arg, cast)
            held.append(argument(number))
            given[i] = _Argument(ctypes.addressof(held[-1]), number.nbytes, 1)  # type: ignore[arg-type]
        all_threads = _three(threads)
        size = _three(group_size) if group_size is not None else (min(all_threads[0], WIDEST_GROUP), 1, 1)
        if max(all_threads) > 2**32 - 1 or math.prod(size) > WIDEST_GROUP:
            raise RuntimeError(f"{self.name}: {all_threads} threads by {size}, expected groups of 1024 at most")
        error = ctypes.create_string_buffer(1000)
        three = ctypes.c_uint * 3
        seed = ctypes.c_ulong(self.emulator.seed)
        if self._run(given, len(args), three(*all_threads), three(*size), seed, error, len(error)):  # type: ignore[operator]
            raise RuntimeError(f"{self.name}: {error.value.decode()}")
        self.emulator.launches.append(self.name)
        self.emulator.read += sum(x.read for x in given)
        self.emulator.written += sum(x.written for x in given)


def _extent(x: Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    if not x.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


def _number(x: object, cast: str | None) -> np.generic:
    """Return a number as the kernel gets it: Python's ints have 64 bits, its floats 32."""
    if not isinstance(x, (bool, int, float)):
        raise TypeError(f"got {type(x).__name__}, expected a tensor or a number")
    if cast is not None:
        return CASTS[cast](x)
    return np.float32(x) if isinstance(x, float) else np.bool_(x) if isinstance(x, bool) else np.int64(x)


def _three(x: int | Sequence[int] | None) -> tuple[int, int, int]:
    given = (x,) if isinstance(x, int) else tuple(x or ())
    if not 1 <= len(given) <= 3:
        raise RuntimeError(f"{given} threads, expected one to three numbers")
    return (*given, *(1,) * (3 - len(given)))  # type: ignore[return-value]


@contextmanager
def emulated_metal(seed: int = 0, options: tuple[str, ...] = ()) -> Iterator[Emulator]:
    """Let launchers of kernels/metal run on CPU tensors; every source compiles once in a process."""
    emulator = Emulator(seed, options, libraries=_libraries)
    for one in _libraries.values():
        for kernel in vars(one).values():
            kernel.emulator = emulator
    compiled.cache_clear()
    with mock.patch.object(torch.mps, "compile_shader", emulator.compile_shader):
        yield emulator
    compiled.cache_clear()


_libraries: dict[tuple[str, tuple[str, ...]], EmulatedLibrary] = {}
