"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from caramba.console import logger
from caramba.runs.starting import imports_without_gc

# Tensors of the tests are tiny: more threads would wait for each other. Read when torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What the tests' imports make is no garbage, as in a command: full collections that leave it out are short."""
    with imports_without_gc():
        return (yield)


@pytest.fixture(autouse=True)
def spoken() -> Iterator[None]:
    """A command that was quiet leaves the next test its words."""
    logger.quiet = False
    yield
    logger.quiet = False
