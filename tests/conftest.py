"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from caramba.console import logger

# Tensors of the tests are tiny: more threads would wait for each other. Read when torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def spoken() -> Iterator[None]:
    """A command that was quiet leaves the next test its words."""
    logger.quiet = False
    yield
    logger.quiet = False
