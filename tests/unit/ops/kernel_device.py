"""Where and with what tests of Triton kernels run: on a GPU, and without one in Triton's interpreter.

The interpreter's process is that of `tests/ops/test_units_in_the_interpreter.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from caramba import kernels
from caramba.ops import backend
from caramba.ops.backend import all_ops

HAS_GPU = torch.cuda.is_available()
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if HAS_GPU else "cpu"
RUNS_KERNELS = [
    *([] if INTERPRETS else [pytest.mark.gpu]),
    pytest.mark.skipif(HAS_GPU == INTERPRETS, reason="needs a CUDA device, or TRITON_INTERPRET=1 without one"),
]
"""The marks of a test file of kernels."""


def attached_kernels(*modules: str) -> Iterator[None]:
    """For a test file's fixture: attach the kernels of these modules of `caramba.kernels.triton`, and fill memory that is
    allocated with NaN until the file ends."""
    places = {op.name: kernels.find_launcher(op, "triton") for op in all_ops().values()}
    ops = [op for op, launcher in places.items() if launcher.__module__.rpartition(".")[2] in modules]
    if HAS_GPU:
        kernels.load("cuda")
    else:
        for op in ops:
            backend.attach(op, "cpu", "triton", places[op])
    assert {backend.implementation(op, DEVICE) for op in ops} == {"triton"}
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
