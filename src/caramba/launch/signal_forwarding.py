"""Signals to the front end of a run of several ranks, passed on to the agent that runs them."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable

from caramba.runs.signals import DeferredSignals

_POLL_S = 0.1


class SignalForwarder(DeferredSignals):
    """Within, Ctrl-C and what would end this process is told to the agent, whose ranks save their state.

    Not by the handler: an agent that nobody told as it started would go on without us, in a session of its own.
    """

    def run(self, start: Callable[[], subprocess.Popen[bytes]]) -> int:
        """Start an agent and return its exit status, negative where a signal ended it.

        Ctrl-C is forwarded as SIGINT and everything else as SIGTERM. The ranks save at the end of their step, without a
        time limit. A second Ctrl-C kills the agent, and the kernel kills its ranks with it (`end_with_agent`).
        """
        agent = start()
        told, is_interrupted = 0, False
        while True:
            for number in self.heard[told:]:
                told += 1
                if number != signal.SIGINT:
                    agent.terminate()
                elif not is_interrupted:
                    agent.send_signal(signal.SIGINT)
                    is_interrupted = True
                else:
                    agent.kill()
                    agent.wait()
                    return -signal.SIGINT
            try:
                return agent.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                continue
