"""Runs the kernel tests of norms, RoPE, SwiGLU, dropout and Lion in Triton's interpreter, which a process starts with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from caramba.kernels import TRITON_AVAILABLE


@pytest.mark.skipif(not TRITON_AVAILABLE, reason="needs triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the device here")
def test_the_kernels_in_the_interpreter() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
            str(Path(__file__).with_name("test_elementwise_kernels.py")),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
