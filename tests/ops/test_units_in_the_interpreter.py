"""Kernel tests of whole files in Triton's interpreter: those of tests/unit. Another file, for another process of the tests."""

from __future__ import annotations

from tests.ops.interpreted import ROOT, run_kernel_tests, runs_interpreted

pytestmark = runs_interpreted


def test_kernels_of_units_in_the_interpreter() -> None:
    run_kernel_tests(ROOT / "tests" / "unit")


def test_no_kernel_test_is_elsewhere() -> None:
    found = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_*_triton.py")}
    assert found == {"ops", "unit"}
