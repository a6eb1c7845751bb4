"""Metal sources through clang, where every address space is a type of its own: g++ cannot check that."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from caramba.kernels.metal.library import source_of
from scripts.metal_sources import MACROS, NUMBERS

HEADER = Path(__file__).parent / "metal_emulator" / "syntax.h"
COMMAND = (
    "clang",
    "-x",
    "c++",
    "-std=c++20",
    "-target",
    "aarch64-linux-gnu",
    "-fsyntax-only",
    "-Wall",
    "-Wextra",
)
OPTIONS = (
    "-Wno-unknown-attributes",
    "-Wno-unknown-pragmas",
    "-Wno-sign-compare",
    "-Werror",
    "-include",
    str(HEADER),
    "-",
)
KERNELS = Path(__file__).parents[2] / "kernels" / "metal"

needs_clang = pytest.mark.skipif(
    shutil.which("clang") is None, reason="needs clang, which knows address spaces (apt-get install clang)"
)


def refusal(source: str) -> str:
    """Return what clang says against a source, nothing where it takes it."""
    text = re.sub(r"^#include <metal_\w+>$", "", source, flags=re.MULTILINE).replace("#pragma once", "")
    text = re.sub(r"^(\s+)(threadgroup \w+ \w+\[)", r"\1static \2", text, flags=re.MULTILINE)
    done = subprocess.run([*COMMAND, *OPTIONS], input=text, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


def test_every_source_is_checked() -> None:
    assert {file.stem for file in KERNELS.glob("*.metal")} == set(MACROS)


@needs_clang
@pytest.mark.parametrize("kind", ["float", "half", "bfloat"])
@pytest.mark.parametrize("name", MACROS)
def test_clang_takes_every_source(name: str, kind: str) -> None:
    macros = dict.fromkeys(MACROS[name], kind) | NUMBERS.get(name, {})
    assert refusal(source_of(name, **macros)) == ""


@needs_clang
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("rms_norm", "threadgroup float* partial", "device float* partial"),
        ("rms_norm", "device const X* own = x", "threadgroup const X* own = x"),
        ("rms_norm", "device const X* other", "const X* other"),
        ("dba_decode", "threadgroup float* key_tile, thread", "device float* key_tile, thread"),
        ("dba_decode", "device const VALUE* values", "constant VALUE* values"),
        ("rope", "device Y* to", "device X* const& to"),
    ],
)
def test_clang_sees_a_pointer_of_another_address_space(name: str, old: str, new: str) -> None:
    kinds = dict(zip(MACROS[name], ("float", "half", "bfloat", "float"), strict=False))
    source = source_of(name, **kinds, **NUMBERS.get(name, {}))
    assert old in source
    assert "error" in refusal(source.replace(old, new))
