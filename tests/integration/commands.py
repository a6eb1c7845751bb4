"""The real command line in a subprocess, in an empty folder with a small shared token cache."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

SMALL = ("data.max_bytes=400000", "data.vocab_size=512", "model.embedder.vocab_size=512")
SMALL_TEACHER = ("model.teacher.manifest.embedder.vocab_size=512",)
TIMEOUT_S = 240


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "CARAMBA_HOME": str(cache), "OMP_NUM_THREADS": "1", "COLUMNS": "110"}


def caramba(
    words: Sequence[str], folder: Path, cache: Path, **extra: object
) -> subprocess.CompletedProcess[str]:
    """Run `python -m caramba WORDS` in `folder` and return what it printed and its exit status."""
    command = [sys.executable, "-m", "caramba", *words]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(cache),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        **extra,
    )


def hear_interrupts() -> None:
    """Undo what a shell does to SIGINT for tests that it runs in the background, and what they would hand on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupt_when(
    path_glob: str, words: Sequence[str], folder: Path, cache: Path, how: signal.Signals, text: str = ""
) -> int:
    """Start a run, send `how` as soon as a file matching `path_glob` exists under `folder` and holds `text`, return
    the exit status."""
    command = [sys.executable, "-m", "caramba", *words]
    log = open(folder / "log.txt", "w")  # noqa: SIM115 - closed with the process
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(cache),
        stdout=log,
        stderr=subprocess.STDOUT,
        preexec_fn=hear_interrupts,
    )
    limit = time.monotonic() + TIMEOUT_S
    while not any(not text or text in path.read_text() for path in folder.glob(path_glob)):
        if process.poll() is not None or time.monotonic() > limit:
            process.kill()
            raise AssertionError(f"ended before {path_glob} existed:\n{(folder / 'log.txt').read_text()}")
        time.sleep(0.02)
    process.send_signal(how)
    status = process.wait(TIMEOUT_S)
    log.close()
    return status


def only_run(folder: Path) -> Path:
    (run,) = folder.glob("runs/*/*")
    return run
