"""A worker that a killed front end of a sweep left behind: it is waited for in place of a second one."""

from __future__ import annotations

import time
from pathlib import Path

from caramba.runs import MANIFEST
from caramba.runs.exit_codes import INTERRUPTED
from caramba.runs.locking import holder_of, is_locked
from caramba.runs.state import FAILED, FINISHED, run_state

POLL_S = 0.5
DEVICES = "CUDA_VISIBLE_DEVICES"


class LiveWorker:
    """A process that holds the lock of a run, with the methods of Popen that a pool uses.

    `pid` is None where the process may not be signalled: it is no worker that a pool started, such as one of a user's
    own `caramba resume`, or this system has no /proc to ask.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.returncode: int | None = None
        number = holder_of(run_dir)
        self.process = None if number is None else Path(f"/proc/{number}")
        words = self._read("cmdline")
        is_worker = b"caramba.worker" in words and str(run_dir / MANIFEST).encode() in words
        self.pid = number if is_worker else None
        self._asked_at = 0.0

    @property
    def devices(self) -> str | None:
        """The GPUs that the process was given, None where that is not known."""
        prefix = f"{DEVICES}=".encode()
        found = (word for word in self._read("environ") if word.startswith(prefix))
        return next((word.removeprefix(prefix).decode() for word in found), None)

    def poll(self) -> int | None:
        """Return the exit status by the records of the run once the process has released it, else None.

        A run that has neither finished nor failed was interrupted.
        """
        if self.returncode is None and time.monotonic() - self._asked_at >= POLL_S:
            self._asked_at = time.monotonic()
            if not is_locked(self.run_dir):
                state = run_state(self.run_dir).state
                self.returncode = {FINISHED: 0, FAILED: 1}.get(state, INTERRUPTED)
        return self.returncode

    def wait(self) -> int:
        """Wait until the process has released the run, and return its exit status."""
        while (status := self.poll()) is None:
            time.sleep(POLL_S)
        return status

    def _read(self, name: str) -> list[bytes]:
        if self.process is None:
            return []
        try:
            return (self.process / name).read_bytes().split(b"\0")
        except OSError:  # It has ended, belongs to another user, or there is no /proc.
            return []
