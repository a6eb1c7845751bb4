"""NVRTC, NVIDIA's compiler in a library: from the sources in this folder to machine code of one architecture."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

SOURCES = Path(__file__).parent
MAJORS = ("13", "12")
"""Releases of CUDA whose NVRTC is looked for, torch's own first."""
_lock = threading.Lock()
_compiled: dict[str, bytes] = {}
_folder: Path | None = None


class NotCompiled(RuntimeError):  # noqa: N818 - the name is the event
    """NVRTC is not here, or refuses a source; the message has its log."""


def keep_in(folder: Path) -> None:
    """Keep what is compiled from now on in files of a folder, for processes to come."""
    global _folder
    _folder = folder


@functools.cache
def library() -> ctypes.CDLL:
    """Load NVRTC, of the release that torch is of where there are several.

    Raises:
        NotCompiled: there is none.
    """
    for path in _places():
        with contextlib.suppress(OSError):  # not there, or for another machine: the next one
            return ctypes.CDLL(path)
    names = ", ".join(f"libnvrtc.so.{major}" for major in _majors())
    raise NotCompiled(f"found no {names}, which torch's CUDA wheels bring along (pip install nvidia-cuda-nvrtc)")


@functools.cache
def version() -> str | None:
    """Return NVRTC's version, or None where there is none."""
    try:
        nvrtc = library()
    except NotCompiled:
        return None
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return f"{major.value}.{minor.value}"


def compile_source(source: str, macros: Mapping[str, object], arch: str) -> bytes:
    """Return the machine code (cubin) of a source for an architecture (`sm_90`), with macros defined.

    `source` is a file of this folder, or an absolute path. It is compiled once, by this or an earlier process.

    Raises:
        NotCompiled: NVRTC is not here, or the source does not compile.
    """
    defines = tuple(f"-D{key}={value}" for key, value in sorted(macros.items()))
    tag = _tag(source, defines, arch)
    with _lock:  # NVRTC itself compiles one program at a time
        code = _compiled.get(tag) or _read(tag)
        if code is None:
            code = _compile(source, defines, arch)
            _write(tag, code)
        _compiled[tag] = code
    return code


def _majors() -> list[str]:
    own = (torch.version.cuda or "").partition(".")[0]
    return sorted(MAJORS, key=lambda major: major != own)


def _places() -> Iterator[str]:
    """Yield where NVRTC may be: next to torch, in NVIDIA's packages, in the loader's path, in a toolkit."""
    folders = [Path(torch.__file__).parent / "lib"]
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        folders += sorted(Path(root).glob("*/lib"))
    toolkits = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    for major in _majors():
        file = f"libnvrtc.so.{major}"
        yield from (str(folder / file) for folder in folders if (folder / file).is_file())
        yield file
        yield from (f"{toolkit}/lib64/{file}" for toolkit in toolkits if toolkit)


@functools.cache
def _text(file: str) -> bytes:
    return (SOURCES / file).read_bytes()


@functools.cache
def _headers() -> dict[bytes, bytes]:
    return {file.name.encode(): _text(file.name) for file in sorted(SOURCES.glob("*.cuh"))}


@functools.cache
def _tag(source: str, defines: tuple[str, ...], arch: str) -> str:
    """Return what tells one compilation from all others."""
    digest = hashlib.sha256(repr((version(), arch, defines)).encode())
    for part in (_text(source), *(part for item in _headers().items() for part in item)):
        digest.update(len(part).to_bytes(8, "little") + part)
    return f"{Path(source).stem}-{arch}-{digest.hexdigest()[:32]}"


def _read(tag: str) -> bytes | None:
    if _folder is None:
        return None
    with contextlib.suppress(OSError):  # not there, or another user's: compiled here then
        return (_folder / f"{tag}.cubin").read_bytes() or None
    return None


def _write(tag: str, code: bytes) -> None:
    """Keep code in a file, written whole: other processes may compile the same."""
    if _folder is None:
        return
    try:
        _folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=_folder, prefix=f".{tag}.", delete=False) as file:
            try:
                file.write(code)
                file.flush()
                os.replace(file.name, _folder / f"{tag}.cubin")
            except OSError:
                os.unlink(file.name)
                raise
    except OSError as error:
        warnings.warn(f"{_folder}: every process compiles kernels again ({error})", stacklevel=2)


def _compile(source: str, defines: tuple[str, ...], arch: str) -> bytes:
    nvrtc = library()
    headers = _headers()
    contents = (ctypes.c_char_p * len(headers))(*headers.values())
    names = (ctypes.c_char_p * len(headers))(*headers)
    words = [f"--gpu-architecture={arch}", "--std=c++17", *defines]
    options = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
    program = ctypes.c_void_p()
    _check(
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), _text(source), source.encode(), len(headers), contents, names),
        "nvrtcCreateProgram",
    )
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(words), options)
        if status:
            log = _take(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            raise NotCompiled(f"{source} for {arch} with {' '.join(defines)}: {_meaning(status)}\n{log}")
        return _take(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _take(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    """Return what NVRTC has of a program: its log, or its code."""
    size = ctypes.c_size_t()
    _check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
    held = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc, f"nvrtcGet{what}")(program, held), what)
    return held.raw


def _check(status: int, what: str) -> None:
    if status:
        raise NotCompiled(f"{what}: {_meaning(status)}")


def _meaning(status: int) -> str:
    explain: Any = library().nvrtcGetErrorString
    explain.restype = ctypes.c_char_p
    return explain(status).decode()
