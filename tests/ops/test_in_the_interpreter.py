"""Kernel tests of whole files, `test_*_triton.py`, in Triton's interpreter. Triton has to be told before it is first
imported, so a process of their own runs them. Where there is a CUDA device they run on it, and not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
PLUGINS = ("-p", "no:cacheprovider", "-p", "tests.ops.patched_once")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="is the interpreter's process")
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the device here")
def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    files = sorted(path.relative_to(TESTS.parent) for path in TESTS.rglob("test_*_triton.py"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-x", *PLUGINS, *map(str, files)],
        cwd=TESTS.parent,
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    silent = [str(file) for file in files if f"PASSED {file}" not in done.stdout]
    assert files, "there are kernel tests"
    assert not silent, "none of their tests ran"
