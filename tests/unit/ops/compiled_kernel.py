"""A Triton kernel compiled for a GPU of a kind, which needs none."""

from __future__ import annotations

import importlib
from typing import Any

import pytest


def compiled(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    aligned: tuple[str, ...] = (),
    **options: Any,
) -> dict[str, Any]:
    """Return what a kernel becomes on Hopper, by kind of code: `types` of arguments, those of constants left out.

    `aligned` arguments are multiples of 16.
    """
    compiler = pytest.importorskip("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    types = types | dict.fromkeys(constants, "constexpr")
    ast = compiler.ASTSource(
        kernel,
        {name: types[name] for name in kernel.arg_names},
        constants,
        {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return compiler.compile(ast, target=target, options=options).asm
