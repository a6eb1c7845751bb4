"""Trials in a process of their own: one that runs out of memory, or is ended for it, takes nothing with it."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
from dataclasses import asdict
from types import TracebackType
from typing import Any, BinaryIO

from caramba.errors import CarambaError
from caramba.experiment.planning.candidate import StepCandidate, Trial

SHOWN_LINES = 8
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""A trial is one process, on the device of rank 0, whatever ranks it is for."""


class TrialProcess:
    """A child process that reads candidates and writes trials, a line of JSON each.

    A candidate that ends it, or runs out of memory, or takes too long, is answered by a refusal; the next candidate
    starts a fresh child.

    Args:
        module: what `python -m` runs; it gets `request` as its first line.
    """

    def __init__(self, module: str, request: dict[str, Any]) -> None:
        self.module, self.request = module, request
        self._child: subprocess.Popen[bytes] | None = None
        self._errors: BinaryIO | None = None

    def __enter__(self) -> TrialProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def measure(self, candidate: StepCandidate, timeout_s: float) -> Trial:
        """Return the trial of a candidate.

        Raises:
            CarambaError: the child failed for another reason than memory or time.
        """
        if self._child is None:
            self._start()
        line = self._ask(asdict(candidate), timeout_s)
        if line is None:
            self._end()
            return Trial(candidate, refusal=f"stopped after {timeout_s:.0f} s, when the budget was used up")
        if not line:
            return self._ended(candidate)
        answer = json.loads(line)
        if "error" in answer:
            self._end()
            raise CarambaError(f"planning: {candidate}: {answer['error']}; plan=off measures nothing")
        trial = Trial(candidate, **{**answer, "seconds": tuple(answer["seconds"])})
        if trial.is_out_of_memory:  # what it left behind is not a clean start
            self._end()
        return trial

    def _start(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        self._child = subprocess.Popen(
            [sys.executable, "-m", self.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={key: value for key, value in os.environ.items() if key not in OF_A_RANK},
            start_new_session=True,  # Ctrl-C reaches it through __exit__ alone
        )
        self._write(self.request)

    def _write(self, value: dict[str, Any]) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(value).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:  # it has ended, which reading from it finds out
            return

    def _ask(self, value: dict[str, Any], timeout_s: float) -> bytes | None:
        """Return the child's answer, empty when it ended, None when there is none in time."""
        self._write(value)
        assert self._child is not None
        assert self._child.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self._child.stdout, selectors.EVENT_READ)
            return self._child.stdout.readline() if ready.select(max(timeout_s, 1.0)) else None

    def _ended(self, candidate: StepCandidate) -> Trial:
        assert self._child is not None
        status = self._child.wait()
        text = self._said()
        self._end()
        if status == -9:  # how the kernel ends what takes too much
            return Trial(candidate, refusal="ended by the kernel, out of memory", is_out_of_memory=True)
        raise CarambaError(
            f"planning: {candidate}: the measuring process ended with status {status}:\n{text}\n"
            "plan=off measures nothing"
        )

    def _said(self) -> str:
        assert self._errors is not None
        self._errors.seek(0)
        return "\n".join(self._errors.read().decode(errors="replace").splitlines()[-SHOWN_LINES:])

    def _end(self) -> None:
        if self._child is None:
            return
        for stream in (self._child.stdin, self._child.stdout, self._errors):
            if stream is not None:
                stream.close()
        self._child.kill()
        self._child.wait()
        self._child, self._errors = None, None
