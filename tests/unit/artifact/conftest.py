"""Fixtures of the artifact tests."""

from __future__ import annotations

import pytest
from sample_run import make_result

from caramba.result import RunResult


@pytest.fixture
def result() -> RunResult:
    return make_result()
