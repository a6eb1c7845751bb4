"""Signals to the front end of a run of several ranks, passed on to the agent that runs them."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable

from caramba.runs.signals import NotedSignals

STOP_S = 60.0
_POLL_S = 0.1


class Relay(NotedSignals):
    """Within, Ctrl-C and what would end this process is told to the agent, whose ranks save their state.

    Not by the handler: an agent that nobody told as it started would go on without us, in a session of its own.
    """

    def run(self, start: Callable[[], subprocess.Popen[bytes]]) -> int:
        """Start an agent and return its exit status, negative where a signal ended it.

        Ctrl-C reaches it as such and everything else as SIGTERM. After Ctrl-C it has STOP_S; then it is killed, and by
        a second one at once, and the kernel ends its ranks with it (`end_with_agent`).
        """
        agent = start()
        told, limit = 0, None
        while True:
            for number in self.heard[told:]:
                told += 1
                if number != signal.SIGINT:
                    agent.terminate()
                elif limit is None:
                    agent.send_signal(signal.SIGINT)
                    limit = time.monotonic() + STOP_S
                else:
                    limit = 0.0
            if limit is not None and time.monotonic() > limit:
                agent.kill()
                agent.wait()
                return -signal.SIGINT
            try:
                return agent.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                continue
