"""What holds for every test."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from caramba.console import logger
from caramba.runs.exit_codes import imports_without_gc

# Tensors of the tests are tiny: more threads would wait for each other. Read when torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

LEFT_OUT = ("compile", "process", "slow")
TORCH_FREE = ("artifact", "collect", "config", "cost", "paper", "runs")
MARKERS = Path(__file__).with_name("markers.toml")


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "leave out tests that compile, start processes or take long; torch-free folders first"
    parser.addoption("--fast", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--fast"):
        sys.addaudithook(_refuse_processes)


def _refuse_processes(event: str, arguments: tuple[object, ...]) -> None:
    if event == "subprocess.Popen" and "PYTEST_CURRENT_TEST" in os.environ:
        test = os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0]
        raise AssertionError(f"{test} starts a process: list it under `process` in tests/markers.toml")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of markers.toml; with --fast leave them out and sort the rest by what they load."""
    listed = tomllib.loads(MARKERS.read_text())
    marks: dict[str, list[str]] = {}
    for mark, names in listed.items():
        for name in names:
            marks.setdefault(name, []).append(mark)
    for item in items:
        for mark in marks.get(item.nodeid.partition("[")[0], ()):
            item.add_marker(mark)
    if not config.getoption("--fast"):
        return
    left_out = [item for item in items if any(item.get_closest_marker(mark) for mark in LEFT_OUT)]
    config.hook.pytest_deselected(items=left_out)
    out = set(left_out)
    items[:] = [item for item in items if item not in out]
    items.sort(key=lambda item: item.path.parent.name not in TORCH_FREE)


@pytest.fixture(autouse=True)
def own_kernel_policy() -> Iterator[None]:
    """Forget the `kernels:` policy that a test asked for: under `reference` no later test would see a lowered model."""
    yield
    module = sys.modules.get("caramba.kernels")
    if module is not None:
        module._policies.clear()


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
