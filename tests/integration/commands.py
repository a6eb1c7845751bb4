"""The real command line in a process of its own, in an empty folder with a small shared token cache.

Where nothing holds a device the processes are forked from one that has loaded the libraries, and so are workers, ranks
and trials that they start. Everywhere else, and where `is_fresh`, they are `python -m caramba`.

Forked processes leave figures blank unless a test `draws`: drawing takes longer than training these models, and is
what tests/unit/artifacts tests.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.preloaded import FORKS, forkserver, run_as_main

SMALL = ("data.max_bytes=400000", "data.vocab_size=512", "model.embedder.vocab_size=512")
SMALL_TEACHER = ("model.teacher.manifest.embedder.vocab_size=512",)
TIMEOUT_S = 400
SERVES = re.compile(r" at (http://\S+?)/v1")
BLANK = {
    "png": b"\x89PNG\r\n\x1a\n",
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "pdf": b"%PDF-1.4\n",
}


def leave_blank(figure: Any, form: str, metadata: dict[str, None]) -> bytes:
    """Take the place of `caramba.artifacts.style._saved`."""
    return BLANK[form]


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "CARAMBA_HOME": str(cache), "OMP_NUM_THREADS": "1", "COLUMNS": "110"}


class Forked:
    """`python -m MODULE WORDS` in a process that is forked from one with the libraries loaded, with Popen's methods."""

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        variables: dict[str, str],
        files: Path,
        prepare: Callable[[], None] | None,
        draws: bool = False,
        module: str = "caramba",
    ) -> None:
        arguments = (module, list(words), str(folder), variables, str(files), prepare, draws)
        self.process = forkserver().Process(target=_command, args=arguments)
        self.process.start()

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.kill()
            raise AssertionError(f"still running after {timeout} s")
        return self.process.exitcode

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def send_signal(self, how: signal.Signals) -> None:
        os.kill(self.pid, how)

    def kill(self) -> None:
        self.process.kill()


def _command(
    module: str,
    words: list[str],
    folder: str,
    variables: dict[str, str],
    files: str,
    prepare: Callable[[], None] | None,
    draws: bool,
) -> None:
    """Open the streams of the command, and become it."""
    os.chdir(folder)
    for number, name, flags in (
        (0, "in", os.O_RDONLY),
        (1, "out", os.O_WRONLY | os.O_APPEND),
        (2, "err", os.O_WRONLY | os.O_APPEND),
    ):
        opened = os.open(Path(files) / name, flags)
        os.dup2(opened, number)
        os.close(opened)
    if not draws:
        from caramba.artifacts import style

        style._saved = leave_blank
    if prepare is not None:
        prepare()
    run_as_main(module, words, variables)


def caramba(
    words: Sequence[str],
    folder: Path,
    cache: Path,
    *,
    input: str = "",
    preexec_fn: Callable[[], None] | None = None,
    is_fresh: bool = False,
    draws: bool = False,
    module: str = "caramba",
) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE WORDS` in `folder` and return what it printed and its exit status."""
    command = [sys.executable, "-m", module, *words]
    if is_fresh or not FORKS:
        return subprocess.run(
            command,
            cwd=folder,
            env=environment(cache),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            input=input,
            preexec_fn=preexec_fn,
        )
    with TemporaryDirectory() as name:
        files = _streams(Path(name), input)
        process = Forked(words, folder, environment(cache), files, preexec_fn, draws, module)
        status = process.wait(TIMEOUT_S)
        return subprocess.CompletedProcess(command, status, (files / "out").read_text(), (files / "err").read_text())


def _streams(files: Path, text: str) -> Path:
    (files / "in").write_text(text)
    for name in ("out", "err"):
        (files / name).touch()
    return files


def hear_interrupts() -> None:
    """Undo what a shell does to SIGINT for tests that it runs in the background, and what they would hand on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupt_when(
    path_glob: str, words: Sequence[str], folder: Path, cache: Path, how: signal.Signals, text: str = ""
) -> int:
    """Start a run, send `how` as soon as a file matching `path_glob` exists under `folder` and holds `text`, return
    the exit status; log.txt holds what it printed.

    A forked run signals itself, without `text`: one that is watched from outside may end before it is looked at.
    """
    log = folder / "log.txt"
    if FORKS and not text:
        prepare = functools.partial(_signal_when_there, f"{folder.resolve()}/{path_glob}", how)
        with started(words, folder, cache, prepare=prepare) as process:
            status = process.wait(TIMEOUT_S)
        assert status != 0, f"ended before {path_glob} existed:\n{log.read_text()}"
        return status
    with started(words, folder, cache) as process:
        limit = time.monotonic() + TIMEOUT_S
        while not any(not text or text in path.read_text() for path in folder.glob(path_glob)):
            if process.poll() is not None or time.monotonic() > limit:
                process.kill()
                raise AssertionError(f"ended before {path_glob} existed:\n{log.read_text()}")
            time.sleep(0.02)
        process.send_signal(how)
        return process.wait(TIMEOUT_S)


def _signal_when_there(path_glob: str, how: signal.Signals) -> None:
    """Have this process sent `how`, by itself or one it starts, at the next event after a file was renamed to a match."""
    main = os.getpid()
    found: list[str] = []
    sent: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not found and event == "os.rename":
            name = os.path.abspath(os.fsdecode(arguments[1]))
            if fnmatch.fnmatch(name, path_glob):
                found.append(name)
        elif found and not sent and event != "os.kill" and os.path.lexists(found[0]):
            sent.append(event)
            os.kill(main, how)

    sys.addaudithook(hook)


@contextlib.contextmanager
def started(
    words: Sequence[str],
    folder: Path,
    cache: Path,
    module: str = "caramba",
    prepare: Callable[[], None] | None = None,
) -> Iterator[Forked | subprocess.Popen[str]]:
    """Start `python -m MODULE WORDS` in a folder, where log.txt holds what it prints."""
    with TemporaryDirectory() as name:
        files = _streams(Path(name), "")
        log = folder / "log.txt"
        log.touch()
        for stream in ("out", "err"):
            (files / stream).unlink()
            (files / stream).symlink_to(log)
        if FORKS:
            yield Forked(words, folder, environment(cache), files, prepare, module=module)
            return
        with open(log, "w") as output:
            yield subprocess.Popen(
                [sys.executable, "-m", module, *words],
                cwd=folder,
                env=environment(cache),
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                preexec_fn=hear_interrupts,
            )


def only_run(folder: Path) -> Path:
    (run,) = folder.glob("runs/*/*")
    return run


@contextlib.contextmanager
def served(model: Path, folder: Path, cache: Path, *words: str) -> Iterator[tuple[Forked | subprocess.Popen[str], str]]:
    """Run `caramba serve` on a free port; yield the process and its address. log.txt holds what it prints."""
    options = ["serve", str(model), "--port", "0", "--device", "cpu", *words]
    with started(options, folder, cache) as process:
        log, limit = folder / "log.txt", time.monotonic() + TIMEOUT_S
        try:
            while not (found := SERVES.search(log.read_text())):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < limit, log.read_text()
                time.sleep(0.02)
            yield process, found[1]
        finally:
            process.kill()
            process.wait(TIMEOUT_S)
