"""A limit on the whole of a request: a client waits and retries for minutes, as may a name server, and a server that
sends a byte now and then never runs into a limit on a single read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class TimedOut(TimeoutError):  # noqa: N818 - the name is the event
    """What was begun did not end in time; of its own it may raise a TimeoutError too."""


def run_with_timeout(seconds: float, work: Callable[[], T]) -> T:
    """Return what `work` returns, or raise what it raises, if it ends in time.

    What does not end in time is left behind in its thread, which ends no later than the process.

    Raises:
        TimedOut: it did not end in time.
    """
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(work())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="caramba-request", daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not returned:
        raise TimedOut(f"no answer within {seconds:g} s")
    return returned[0]
