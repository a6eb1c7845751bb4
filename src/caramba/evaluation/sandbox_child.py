"""The other side of `sandbox`: a program of its own that shuts itself in, runs Python, and reports how it ended.

Started as `python -I -S sandbox_child.py` with JSON on its standard input. From the standard library alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys

CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
NO_NEW_PRIVILEGES = 38
# Landlock: system calls, and the rights of its first version.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read a file, list a folder
ALL_RIGHTS = (1 << 13) - 1
PATH_BENEATH = 1
LONGEST_ANSWER = 400


def close_network(libc: ctypes.CDLL) -> bool:
    """Leave the machine's network, processes and shared memory; whether the kernel allows it."""
    return libc.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWPID) == 0


def close_files(libc: ctypes.CDLL, readable: list[str], writable: str) -> bool:
    """Leave only Python itself readable and the folder `writable` writable; whether the kernel allows it (Landlock)."""
    attributes = ctypes.create_string_buffer(struct.pack("Q", ALL_RIGHTS))
    rules = libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(8), ctypes.c_uint(0))
    if rules < 0:
        return False
    for folder, rights in [*((path, READ) for path in readable), (writable, ALL_RIGHTS)]:
        try:
            place = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        if not os.path.isdir(folder):
            rights &= ~(1 << 3)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, place))
        if libc.syscall(ADD_RULE, rules, PATH_BENEATH, rule, ctypes.c_uint(0)) != 0:
            return False
        os.close(place)
    if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        return False
    return libc.syscall(RESTRICT_SELF, rules, ctypes.c_uint(0)) == 0


def bound(job: dict) -> None:
    """Bound time, memory, size of files, and number of files and processes."""
    seconds, size = int(job["timeout_s"]) + 1, job["memory_mb"] << 20
    for name, limit in (
        ("RLIMIT_CPU", seconds),
        ("RLIMIT_AS", size),
        ("RLIMIT_FSIZE", 1 << 20),
        ("RLIMIT_NOFILE", 32),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_NPROC", 0),
    ):
        if hasattr(resource, name):
            resource.setrlimit(getattr(resource, name), (limit, limit))


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    answer = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    has_linux = sys.platform == "linux"
    libc = ctypes.CDLL(None, use_errno=True)
    closed = {
        "network": has_linux and close_network(libc),
        "files": has_linux and close_files(libc, job["readable"], os.getcwd()),
    }
    # Where processes are closed too, the next one is the first of its own, which no signal of its own ends.
    child = os.fork()
    if child:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, job["timeout_s"])
        os.waitpid(child, 0)
        os._exit(0)
    bound(job)
    found = {"nonce": job["nonce"], "closed": closed, "error": None}
    try:
        exec(compile(job["source"], "<answer>", "exec"), {"__name__": "__main__"})
    except BaseException as error:
        found["error"] = f"{type(error).__name__}: {error}"[:LONGEST_ANSWER]
    os.write(answer, json.dumps(found).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
