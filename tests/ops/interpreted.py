"""Files of kernel tests, `test_*_triton.py`, in Triton's interpreter: a process of their own runs them, as Triton has to be
told before it is first imported. Where there is a CUDA device they run on it, and not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PLUGINS = ("-p", "no:cacheprovider", "-p", "tests.ops.patched_once")

runs_interpreted = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="is the interpreter's process"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the device here"),
]
"""The marks of a test file that starts such a process."""


def run_kernel_tests(folder: Path) -> None:
    """Run the files of kernel tests below a folder.

    Raises:
        AssertionError: a test failed, or a file of them ran none.
    """
    pytest.importorskip("triton")
    files = sorted(path.relative_to(ROOT) for path in folder.rglob("test_*_triton.py"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-x", *PLUGINS, *map(str, files)],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    silent = [str(file) for file in files if f"PASSED {file}" not in done.stdout]
    assert files, f"{folder} has no kernel tests"
    assert not silent, "none of their tests ran"
