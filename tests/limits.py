"""Limits of memory and CPU time for what a test runs in its own process."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def limited_memory(more_bytes: int) -> Iterator[None]:
    """Let this process allocate so much more than it has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class TooSlow(BaseException):
    """The CPU time is used up; not an error, so that nothing handles it."""


@contextlib.contextmanager
def limited_cpu(seconds: float) -> Iterator[None]:
    """Raise `TooSlow` in this block after so much CPU time of the process."""

    def stop(number: int, frame: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
