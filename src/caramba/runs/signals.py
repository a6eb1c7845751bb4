"""Signals by which a system asks for its place back: a run stops where it can go on, and says which signal it was."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

from caramba.errors import Preempted
from caramba.runs.ending import INTERRUPTED, PREEMPTED, TERMINATED

WANTED_BACK = (signal.SIGUSR1, signal.SIGUSR2)
"""By these a system says that it wants its place back, and may start the run again."""
STOPPING = (signal.SIGTERM, *WANTED_BACK)
ENDING = (*STOPPING, signal.SIGHUP)
"""What ends a process that does not handle it, a closed terminal among it; Ctrl-C is Python's own."""
AGAIN_S = 0.05


class _Request:
    """What has been asked of this process, and whether it is where it can only stop at the end of a step."""

    is_heard = False
    follows = False
    number = 0
    waits = False


_request = _Request()


def requested() -> int:
    """Return the number of the signal that asked this process to stop, 0 when none did."""
    return _request.number


@contextlib.contextmanager
def handled(numbers: Iterable[int], handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Within, these signals are the handler's; then those that had them before have them again.

    What this process ignores stays ignored: by nohup it outlives its terminal, and in a shell's background Ctrl-C.
    """
    heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


class NotedSignals:
    """Within, Ctrl-C and what would end this process is noted in `heard`, in order, and nothing is raised.

    For who starts processes: what a handler raises Python drops around a fork, and a process whose start is cut off is
    known to nobody and goes on. Who notes them looks where every process is known.
    """

    def __init__(self) -> None:
        self.heard: list[int] = []
        self._handlers = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._handlers.enter_context(
            handled((signal.SIGINT, *ENDING), lambda number, _: self.heard.append(number))
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.close()

    @property
    def status(self) -> int:
        """The exit status of a run that was stopped by what was heard, 0 where nothing was."""
        if not self.heard:
            return 0
        if signal.SIGINT in self.heard:
            return INTERRUPTED
        return PREEMPTED if all(number in WANTED_BACK for number in self.heard) else TERMINATED


@contextlib.contextmanager
def stop_on_signals(*, follows: bool = False) -> Iterator[None]:
    """Within, SIGTERM, SIGUSR1 and SIGUSR2 raise Preempted: at once, or in training at the end of a step.

    A process that `follows` another waits for it outside training, in calls that no Python handler interrupts: there
    SIGTERM ends it as it ends any process, and the other two leave it to hear from whom it follows.

    Python drops what a handler raises in a finalizer, and in callbacks of the garbage collector or around a fork: a
    stop or Ctrl-C that was dropped there is asked for again a moment later. One that other code took for an error of
    its own is lost, and the next signal stops the run.

    Only the main thread hears signals; in any other this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _request.number, _request.waits, _request.follows, _request.is_heard = 0, False, follows, True
    before = {number: signal.getsignal(number) for number in STOPPING}
    try:
        _between_steps()
        with _asked_again():
            yield
    finally:
        _request.is_heard = False
        for number, handler in before.items():
            signal.signal(number, handler)


def listen() -> None:
    """Within `stop_on_signals`, hear the signals again, which a library may have taken over."""
    if _request.is_heard:
        for number in STOPPING:
            signal.signal(number, _heard)


@contextlib.contextmanager
def until_step_ends() -> Iterator[None]:
    """Within, a signal is only noted: whoever trains asks `requested` when a step has ended, and saves first."""
    _request.waits = True
    listen()
    try:
        yield
    finally:
        _request.waits = False
        _between_steps()
    if (
        _request.number and not _request.follows
    ):  # it came after the last step: what was trained is saved by now
        raise Preempted(signal.Signals(_request.number).name)


def _between_steps() -> None:
    if _request.is_heard and _request.follows:
        for number in STOPPING:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
    else:
        listen()


def _heard(number: int, _: Any) -> None:
    if _request.number and (_request.waits or _is_stopping()):
        return  # it is stopping already, and must not be stopped in that
    _request.number = _request.number or number
    if not _request.waits:
        raise Preempted(signal.Signals(_request.number).name)


def _is_stopping() -> bool:
    """Whether a stop is on its way out: this was called within a `finally` or `except` that it passes through."""
    error = sys.exception()
    while error is not None and not isinstance(error, Preempted):
        error = error.__context__
    return error is not None


@contextlib.contextmanager
def _asked_again() -> Iterator[None]:
    """Within, what Python tells of a stop or Ctrl-C that it drops sends the signal once more."""
    before, main, process = sys.unraisablehook, threading.main_thread(), os.getpid()

    def dropped(what: Any) -> None:
        is_stop = issubclass(what.exc_type, (Preempted, KeyboardInterrupt))
        if not is_stop or threading.current_thread() is not main or os.getpid() != process:
            before(what)
            return
        number = signal.SIGINT if what.exc_type is KeyboardInterrupt else _request.number
        # Not from here, where it would be dropped as well.
        again = threading.Timer(AGAIN_S, signal.pthread_kill, (main.ident, number))
        again.daemon = True
        again.start()

    sys.unraisablehook = dropped
    try:
        yield
    finally:
        sys.unraisablehook = before
