"""Fixtures of the artifact tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_run import make_result

from caramba.artifacts import write
from caramba.result import RunResult


@pytest.fixture
def result() -> RunResult:
    return make_result()


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with every artifact, to read from."""
    run_dir = tmp_path_factory.mktemp("run")
    write(make_result(), run_dir)
    return run_dir
