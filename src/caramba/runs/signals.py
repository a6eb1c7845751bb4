"""Signals by which a system asks for its place back: a run stops where it can go on, and says which signal it was."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from caramba.errors import Preempted

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
ENDING = (*STOPPING, signal.SIGHUP)
"""What ends a process that does not handle it, a closed terminal among it; Ctrl-C is Python's own."""


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


def heeded(numbers: Iterable[int]) -> tuple[int, ...]:
    """Return those of some signals that this process was not told to ignore, as nohup tells it of SIGHUP."""
    return tuple(number for number in numbers if signal.getsignal(number) != signal.SIG_IGN)


@contextlib.contextmanager
def handled(numbers: Iterable[int], handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Within, these signals are the handler's; then those that had them before have them again."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextlib.contextmanager
def stop_on_signals(*, follows: bool = False) -> Iterator[None]:
    """Within, SIGTERM, SIGUSR1 and SIGUSR2 raise Preempted: at once, or in training at the end of a step.

    A process that `follows` another waits for it outside training, in calls that no Python handler interrupts: there
    SIGTERM ends it as it ends any process, and the other two leave it to hear from whom it follows.

    Only the main thread hears signals; in any other this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _request.number, _request.waits, _request.follows, _request.is_heard = 0, False, follows, True
    before = {number: signal.getsignal(number) for number in STOPPING}
    try:
        _between_steps()
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
    if _request.number:
        return  # it is stopping already, and must not be stopped in that
    _request.number = number
    if not _request.waits:
        raise Preempted(signal.Signals(number).name)
