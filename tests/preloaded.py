"""Processes of tests that are forked from one with the libraries loaded: loading them takes longer than most runs.

Only where nothing holds a device; everywhere else they are fresh processes.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# A process that has asked for CUDA devices must not be forked, and neither may one that runs Objective-C.
FORKS = sys.platform == "linux" and not Path("/dev/nvidiactl").exists()
PRELOADED = [
    *("caramba.launch.run", "caramba.launch.compose", "caramba.worker", "caramba.experiment.run"),
    *("caramba.launch.launchers.elastic", "caramba.train.trainer", "caramba.train.strategies"),
    *("caramba.evaluation.latency", "torch.utils.tensorboard", "pytest", "caramba.paper", "tests.composed"),
]
ROOT = Path(__file__).parents[1]
RANK = "rank "
"""How the name of a rank's process begins."""
OURS = ("caramba", "torch.distributed.run")
_kept: list[Any] = []
"""Streams of a parent: a child that let go of them would write what they hold once more."""


def forkserver() -> Any:
    """Return the context whose processes are forked from one that has loaded PRELOADED."""
    sys.audit("subprocess.Popen", sys.executable, ["forkserver"], None, None)  # `make test-fast` refuses to start one
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with contextlib.chdir(ROOT):  # where its imports find `tests`
        multiprocessing.forkserver.ensure_running()
    return context


def start_ranks(rank_main: Callable[..., None], arguments: tuple[Any, ...], count: int) -> None:
    """Run `rank_main(rank, *arguments)` in `count` processes; the first error of one is raised."""
    from torch.multiprocessing.spawn import start_processes

    if FORKS:
        forkserver()
    start_processes(rank_main, arguments, count, start_method="forkserver" if FORKS else "spawn")


def run_as_main(module: str, words: Sequence[str], variables: Mapping[str, str]) -> None:
    """Do in a forked process what the interpreter does around `python -m MODULE WORDS` in the current folder.

    What this process starts by `python -m` of our own modules is forked from it in turn.
    """
    gc.enable()
    gc.freeze()  # collecting in a run would look through, and so copy, all that was loaded before
    multiprocessing.set_start_method(None, force=True)  # the system's own, not the one that made this process
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    # Also where a shell runs the tests in the background, which ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(variables)
    # An agent asks every loaded module for the caller of each event.
    if "elastic" in module or module.startswith("torch"):
        rendezvous: Any = sys.modules["torch.distributed.elastic.rendezvous.dynamic_rendezvous"]
        rendezvous.get_method_name = lambda: ""
    _kept.append((sys.stdin, sys.stdout, sys.stderr))
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115 - closed with the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = [module, *words]
    sys.path.insert(0, os.getcwd())
    subprocess.Popen.__init__ = _start
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*found in sys.modules", category=RuntimeWarning)
        runpy.run_module(module, run_name="__main__", alter_sys=True)


_popen = subprocess.Popen.__init__


def _start(self: subprocess.Popen[Any], args: Any, *values: Any, **options: Any) -> None:
    """`Popen(args, …)`, which runs no interpreter where one would run a module of ours."""
    found = _module(args)
    if found is not None:
        variables = options.get("env")
        prepare, kept = options.get("preexec_fn"), options.get("pass_fds", ())
        options["preexec_fn"] = lambda: _become(*found, variables or dict(os.environ), kept, prepare)
        sys.stdout.flush()
        sys.stderr.flush()
    _popen(self, args, *values, **options)


def _module(command: object) -> tuple[str, list[str]] | None:
    if isinstance(command, str | bytes | os.PathLike) or not isinstance(command, Sequence):
        return None
    program, *words = map(str, command)
    words = words[1:] if words[:1] == ["-u"] else words
    if program != sys.executable or words[:1] != ["-m"] or not words[1].startswith(OURS):
        return None
    return words[1], words[2:]


def _become(
    module: str,
    words: list[str],
    variables: Mapping[str, str],
    kept: Sequence[int],
    prepare: Callable[[], None] | None,
) -> None:
    """Go on as that program in the process that was forked for it, and end with it."""
    if prepare is not None:
        prepare()
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))
    if rank := variables.get("RANK"):  # what is in /proc of its environment is the first process's
        Path("/proc/self/comm").write_text(f"{RANK}{rank}")
    context = multiprocessing.get_context("fork")
    process: Any = context.Process(target=run_as_main, args=(module, words, variables))
    os._exit(process._bootstrap())
