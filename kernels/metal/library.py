"""Compiles Metal sources, once for each set of macros, and checks which calls kernels take."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TYPES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}
SIMD, WIDEST_GROUP = 32, 1024
LEAST_GROUPS, MOST_ROWS = 16, 32
"""Threadgroups of a launch over rows before any has two rows, and rows of one at most."""
MOST_THREADS = 2**32 - 1
"""Positions in a grid have 32 bits."""
_HERE = Path(__file__).parent
_INCLUDE = re.compile(r'^#include "([\w.]+)"$', re.MULTILINE)
_refused: dict[tuple[str, tuple[tuple[str, object], ...]], str] = {}


class CompileError(RuntimeError):
    """Metal's compiler refuses a source; the message has its line."""


def source_of(name: str, **macros: object) -> str:
    """Return the text of a source with its macros, and what it includes, in place."""
    text = (_HERE / f"{name}.metal").read_text(encoding="utf-8")
    text = _INCLUDE.sub(lambda found: (_HERE / found[1]).read_text(encoding="utf-8"), text)
    return "".join(f"#define {key} {value}\n" for key, value in macros.items()) + text


@functools.cache
def compiled(name: str, macros: tuple[tuple[str, object], ...]) -> Any:
    """Return the library of a source with these macros: each kernel is an attribute of it.

    Raises:
        Exception: what torch raises where Metal's compiler refuses it.
    """
    return torch.mps.compile_shader(source_of(name, **dict(macros)))


def find(name: str, **macros: object) -> Any:
    """Return the library of a source with these macros.

    Raises:
        CompileError: Metal's compiler refuses it; it is not tried again.
    """
    key = (name, tuple(macros.items()))
    if key not in _refused:
        try:
            return compiled(*key)
        except Exception as error:  # torch raises SyntaxError or RuntimeError, with the compiler's text
            lines = [line.strip() for line in str(error).splitlines() if "error" in line] or [str(error)]
            _refused[key] = f"kernels/metal/{name}.metal does not compile: {lines[0]}"
    raise CompileError(_refused[key])


def takes(*tensors: Tensor | None) -> bool:
    """Whether kernels take tensors of these types: float32, float16 and bfloat16, and something in the first."""
    return all(x is None or x.dtype in TYPES for x in tensors) and tensors[0] is not None and tensors[0].numel() > 0


def type_of(x: Tensor | None, otherwise: Tensor) -> str:
    """Return Metal's name of a tensor's dtype."""
    return TYPES[(otherwise if x is None else x).dtype]


def group_size(wanted: int, most: int = 256) -> int:
    """Return how many threads to launch for so many elements: whole simdgroups."""
    return min(most, -(-wanted // SIMD) * SIMD)


def rows_of(x: Tensor) -> Tensor:
    """Return x as rows [R, D] whose features are adjacent."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def rows_per_group(rows: int) -> int:
    """Return how many rows share a threadgroup: it reads weights once for all of them."""
    return min(MOST_ROWS, -(-rows // LEAST_GROUPS))
