"""Every CUDA kernel compiles for Hopper in all that a GPU sees of formats, and its blocks have what they need there."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.ops.emulated import KERNELS
from tests.ops.hopper import SHARED_BYTES

heads, latent, nvrtc, int4_gemv = (
    importlib.import_module(f"caramba.kernels.cuda.{x}") for x in ("heads", "latent", "nvrtc", "int4_gemv")
)
pytestmark = pytest.mark.skipif(nvrtc.version() is None and shutil.which("nvcc") is None, reason="needs NVRTC or nvcc")
MIXED = ("q4_0", "q8_0", "q4_0")
FORM = {"group": 4, "queries": 1, "has_window": False, "final": False, "in_bf16": True}


def compiled(name: str, macros: dict[str, object], folder: Path, arch: str = "sm_90", most_spilled: int = 0) -> bytes:
    """Return a kernel's machine code for Hopper, and check that a lane's numbers stay in its registers, but for so many
    bytes, as far as the compiler says it."""
    if nvrtc.version() is not None:
        return nvrtc.compile_source(f"{name}.cu", macros, arch)
    defines = [f"-D{key}={value}" for key, value in macros.items()]
    command = ["nvcc", f"-arch={arch}", "-cubin", "-std=c++17", "-Xptxas", "-v", *defines]
    done = subprocess.run(
        [*command, str(KERNELS / f"{name}.cu"), "-o", str(folder / "x")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    spilled = re.findall(r"(\d+) bytes spill", done.stderr)
    assert spilled, done.stderr
    assert max(map(int, spilled)) <= most_spilled, done.stderr
    return (folder / "x").read_bytes()


@pytest.mark.parametrize(
    ("kinds", "way", "changed"),
    [
        (("q8_0",) * 3, heads.HeadsConfig(), {}),
        (("nf4",) * 3, heads.HeadsConfig(8, 2, 2), {"announced": True}),
        (MIXED, heads.HeadsConfig(4, 3, 2), {"queries": 2, "has_window": True}),
        (("q4_0",) * 3, heads.HeadsConfig(4, 2, 1), {"final": True, "in_bf16": False, "tail_in_bf16": False}),
    ],
    ids=("q8_0", "nf4, announced", "questions and a window", "one split, float16"),
)
def test_heads(kinds: tuple[str, ...], way: Any, changed: dict[str, Any], tmp_path: Path) -> None:
    form = {**FORM, **changed}
    dims, rows = (16, 32, 64), form["group"] * form["queries"]
    assert heads.fits(kinds, dims, 8, rows, way)
    assert heads.shared_bytes(kinds, dims, rows, way) * way.blocks <= SHARED_BYTES
    code = compiled("decode_heads", heads.macros(kinds, dims, way, kv_heads=8, **form), tmp_path)
    assert code.startswith(b"\x7fELF")


@pytest.mark.parametrize(("kind", "width"), [("q4_0", 128), ("nf4", 64)])
def test_heads_whose_keys_have_one_part(kind: str, width: int, tmp_path: Path) -> None:
    kinds, dims = (kind, "zeros", kind), (width, 16, width)
    way = heads.HeadsConfig(6, 2, 1)
    assert heads.fits(kinds, dims, 8, 4, way)
    assert heads.shared_bytes(kinds, dims, 4, way) <= SHARED_BYTES
    macros = heads.macros(kinds, dims, way, kv_heads=8, **FORM)
    assert macros["D_GEO"] == 0
    assert compiled("decode_heads", macros, tmp_path).startswith(b"\x7fELF")


@pytest.mark.parametrize(
    ("kind", "geo", "grouped"),
    [("q4_0", 64, True), ("nf4", 256, False), ("q8_0", 256, True)],
    ids=lambda value: ("products of a warp", "of four warps")[value] if isinstance(value, bool) else str(value),
)
def test_latents(kind: str, geo: int, grouped: bool, tmp_path: Path) -> None:
    kinds, dims = (kind, "q8_0"), (128, geo)
    way = latent.LatentConfig(warps=12, grouped=grouped, stages=(1, 1))
    assert latent.fits(kinds, dims, way)
    assert latent.shared_bytes(kinds, dims, way) <= SHARED_BYTES
    macros = latent.macros(kinds, dims, way, **{**FORM, "group": 32})
    assert compiled("decode_latent", macros, tmp_path, "sm_90a" if grouped else "sm_90", most_spilled=48).startswith(
        b"\x7fELF"
    )


@pytest.mark.parametrize(
    ("kinds", "dims", "kv_heads", "rows"),
    [
        (("q4_0", "bf16", "q4_0"), (16, 32, 64), 8, 4),
        (MIXED, (16, 32, 64), 3, 4),
        (MIXED, (16, 32, 64), 8, 9),
        (MIXED, (8, 32, 64), 8, 4),
        (MIXED, (16, 48, 64), 8, 4),
        (MIXED, (16, 32, 16), 8, 4),
        (MIXED, (16, 32, 160), 8, 4),
        (("nf4",) * 3, (16, 32, 32), 8, 4),
        (("q8_0", "q8_0", "zeros"), (16, 32, 64), 8, 4),
        (("q8_0", "zeros", "q8_0"), (48, 16, 64), 8, 4),
    ],
    ids=("numbers", "odd heads", "many rows", "half a step", "a block and a half", "values of half a block",
         "wide values", "values of half an nf4 block", "values that are none", "one part of a block and a half"),
)  # fmt: skip
def test_what_heads_do_not_read(kinds: tuple[str, ...], dims: tuple[int, ...], kv_heads: int, rows: int) -> None:
    assert heads.fits(MIXED, (16, 32, 64), 8, 4, heads.HeadsConfig())
    assert not heads.fits(kinds, dims, kv_heads, rows, heads.HeadsConfig())


@pytest.mark.parametrize(
    ("product", "form"),
    [
        ((8192, 2048, 1, True), {"norm": "wide", "has_bias": True}),
        ((2048, 8192, 1, False), {"norm": "same", "has_residual": True, "in_bf16": False}),
        ((2048, 640, 8, False), {"has_residual": True}),
        ((8192, 2048, 64, True), {}),
    ],
    ids=("gate and up", "wide, float16", "eight rows, uneven", "most rows"),
)
def test_words_of_codes(product: tuple[int, int, int, bool], form: dict[str, Any], tmp_path: Path) -> None:
    shape = int4_gemv.Int4Shape(*product)
    way = int4_gemv.heuristic_tile(shape)
    plain = {"in_bf16": True, "norm": "none", "has_bias": False, "has_residual": False}
    assert int4_gemv.shared_bytes(shape, way, is_normed="norm" in form) <= SHARED_BYTES
    code = compiled("int4_gemv", int4_gemv.macros(shape, way, **plain | form), tmp_path)
    assert code.startswith(b"\x7fELF")
