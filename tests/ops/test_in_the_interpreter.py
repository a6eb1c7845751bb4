"""Kernel tests of whole files in Triton's interpreter: those of this folder."""

from __future__ import annotations

from pathlib import Path

from tests.ops.interpreted import run_kernel_tests, runs_interpreted

pytestmark = runs_interpreted


def test_kernels_in_the_interpreter() -> None:
    run_kernel_tests(Path(__file__).parent)
