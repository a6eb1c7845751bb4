"""What holds for every test."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
import tomllib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite

from caramba.console import logger
from caramba.runs.exit_codes import imports_without_gc
from tests import examples

# Tensors of the tests are tiny: more threads would wait for each other. Read when torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Threads of commands that set their own number sleep while they wait: spinning beside other tests takes 12 times the
# CPU time of the work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# An image of a container may forbid bytecode: then every process of the tests compiles the sources that it loads.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

LEFT_OUT = ("compile", "process", "slow")
TORCH_FREE = ("artifacts", "config", "estimate", "paper", "runs")
MARKERS = Path(__file__).with_name("markers.toml")
LONGEST = Path(__file__).with_name("longest_files.txt")
SIGNALS = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE", "SIGUSR1", "SIGALRM")
    if hasattr(signal, name)
]


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "leave out tests that compile, start processes or take long; torch-free folders first"
    parser.addoption("--fast", action="store_true", help=text)
    parser.addoption("--thorough", action="store_true", help="take all random examples, not a third of them")


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(20_000)  # looking for garbage every 700 objects takes a tenth of the time of unit tests
    examples.is_thorough = config.getoption("--thorough")
    if config.getoption("numprocesses", None):  # not in its processes: they are told of none
        _rewrite_asserts(config)
    if config.getoption("--fast"):
        sys.addaudithook(_refuse_processes)


def _rewrite_asserts(config: pytest.Config) -> None:
    """Write the bytecode of all test files, which else each of the processes makes for itself: they load the same files
    at the same time. Half is done in another process."""
    if sys.platform != "linux":
        return
    state = config.stash[rewrite.assertstate_key]
    child = os.fork()
    try:
        for path in sorted(MARKERS.parent.rglob("test_*.py"))[child != 0 :: 2]:
            pyc = rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
            if rewrite._read_pyc(path, pyc) is not None or not rewrite.try_makedirs(pyc.parent):
                continue
            with contextlib.suppress(SyntaxError):  # which is reported where the file is loaded
                digest, code = rewrite._rewrite_test(path, config)
                rewrite._write_pyc(state, code, digest, pyc)
    finally:
        if child == 0:
            os._exit(0)
    os.waitpid(child, 0)


def _refuse_processes(event: str, arguments: tuple[object, ...]) -> None:
    if event == "subprocess.Popen" and "PYTEST_CURRENT_TEST" in os.environ:
        test = os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0]
        raise AssertionError(f"{test} starts a process: list it under `process` in tests/markers.toml")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of markers.toml; with --fast leave them out and sort the rest by what they load.

    Else files that take long come first: processes take files in this order, and the last should end together.
    """
    listed = tomllib.loads(MARKERS.read_text())
    marks: dict[str, list[str]] = {}
    for mark, names in listed.items():
        for name in names:
            marks.setdefault(name, []).append(mark)
    for item in items:
        for mark in marks.get(item.nodeid.partition("[")[0], ()):
            item.add_marker(mark)
    if not config.getoption("--fast"):
        ranks = {name: rank for rank, name in enumerate(LONGEST.read_text().split())}
        items.sort(key=lambda item: ranks.get(item.nodeid.partition("::")[0], len(ranks)))
        return
    left_out = [item for item in items if any(item.get_closest_marker(mark) for mark in LEFT_OUT)]
    config.hook.pytest_deselected(items=left_out)
    out = set(left_out)
    items[:] = [item for item in items if item not in out]
    items.sort(key=lambda item: item.path.parent.name not in TORCH_FREE)


@pytest.fixture(autouse=True)
def own_process_state() -> Iterator[None]:
    """Begin with the same random numbers, and undo what a test leaves for the next one of its process: which that is
    differs between machines."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    random.seed(0)
    if numpy is not None:
        numpy.random.seed(0)
    if torch is not None:
        torch.default_generator.manual_seed(0)
    threads = torch.get_num_threads() if torch is not None else None
    folder, path, variables = os.getcwd(), sys.path[:], dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    os.chdir(folder)
    sys.path[:] = path
    changed = {
        name
        for name in variables.keys() | os.environ.keys()
        if variables.get(name) != os.environ.get(name) and name != "PYTEST_CURRENT_TEST"
    }
    for name in changed:
        if name in variables:
            os.environ[name] = variables[name]
        else:
            del os.environ[name]
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler and handler is not None:
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.signal(number, handler)
    if torch is not None:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        if torch.are_deterministic_algorithms_enabled():  # asked first: the other call loads the compiler
            torch.use_deterministic_algorithms(False)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


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


@pytest.fixture
def blank_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave figures of this process blank, as those of forked commands are: drawing them takes most of a tiny run."""
    from caramba.artifacts import style
    from tests.integration.commands import leave_blank

    monkeypatch.setattr(style, "_saved", leave_blank)
