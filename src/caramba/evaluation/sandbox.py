"""Runs Python that a model wrote: a process of its own with bounds, without network and without the user's files."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

_CHILD = Path(__file__).with_name("sandbox_child.py")
_STARTING_S = 5.0
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")


@dataclass(frozen=True)
class Outcome:
    """How a program ended; `error` is empty where it ran to its end."""

    error: str
    is_network_closed: bool = False
    are_files_closed: bool = False

    @property
    def is_passed(self) -> bool:
        return not self.error


def run_python(source: str, *, timeout_s: float, memory_mb: int) -> Outcome:
    """Run a program in an empty folder, with an empty environment and no output, and kill what it leaves.

    It has passed when it runs to its end: one that exits, raises, or is killed has not. On Linux it has no network and
    no processes but its own (name spaces), and reads Python's own files alone (Landlock), where the kernel allows both;
    the outcome reports it.
    """
    nonce = secrets.token_hex(16)
    job = {
        "source": source,
        "nonce": nonce,
        "timeout_s": timeout_s,
        "memory_mb": memory_mb,
        "readable": sorted({sysconfig.get_path("stdlib"), sys.base_prefix + "/lib", *_LIBRARIES}),
    }
    with tempfile.TemporaryDirectory(prefix="caramba-sandbox-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(json.dumps(job).encode(), timeout=timeout_s + _STARTING_S)
        except subprocess.TimeoutExpired:
            return Outcome(f"ran longer than {timeout_s:g} s")
        finally:
            _kill(process)
    return _read(said, nonce, timeout_s)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _read(said: bytes, nonce: str, timeout_s: float) -> Outcome:
    try:
        found = json.loads(said)
        is_ours = found["nonce"] == nonce
    except (ValueError, KeyError, TypeError):
        is_ours, found = False, {}
    if not is_ours:
        return Outcome(f"ended before its last line, by itself, for memory, or after {timeout_s:g} s")
    closed = found["closed"]
    return Outcome(found["error"] or "", bool(closed["network"]), bool(closed["files"]))
