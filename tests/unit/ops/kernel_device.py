"""Where tests of Triton kernels run: on a GPU, and without one in Triton's interpreter.

The interpreter's process is that of `tests/ops/test_in_the_interpreter.py`.
"""

from __future__ import annotations

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if HAS_GPU else "cpu"
RUNS_KERNELS = [
    *([] if INTERPRETS else [pytest.mark.gpu]),
    pytest.mark.skipif(
        HAS_GPU == INTERPRETS, reason="needs a CUDA device, or TRITON_INTERPRET=1 without one"
    ),
]
"""The marks of a test file of kernels."""
