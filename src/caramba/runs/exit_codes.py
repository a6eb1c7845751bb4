"""How a command ends: errors become one readable text and an exit status, tracebacks only on request."""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from caramba.console import logger, visible
from caramba.errors import BatchReduced, CarambaError, Preempted
from caramba.runs.files import home
from caramba.runs.ranks import is_rank


@contextlib.contextmanager
def imports_without_gc() -> Iterator[None]:
    """Import in this block what brings torch: nothing looks for garbage meanwhile, and never among what it loaded.

    Where torch is loaded already the block changes nothing: by then there may be garbage, which is to be collected.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


MISTAKE = 2
PREEMPTED = 75
"""The system wants the place back and the state is saved: start it again (EX_TEMPFAIL of sysexits)."""
REDUCED = BatchReduced.exit_status
"""Memory ran out on a rank, and its phase has a smaller batch from now on: start all ranks again."""
REDUCED_REASON = "reduced: "
"""What the reason of such a batch begins with in plan.json."""
INTERRUPTED = 130
TERMINATED = 143
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SHM = Path("/dev/shm")
_FULL_SHM = (
    "unable to write to file </torch_",
    "insufficient shared memory",
    "unable to allocate shared memory",
)
STOPPED = (PREEMPTED, INTERRUPTED, TERMINATED)
"""Statuses of a run that was asked to stop: it has not failed, and resumes when it is started again."""


def run_command(command: Callable[[], int], *, is_debug: bool = False) -> int:
    """Run `command` and return its exit status.

    A user's mistake is 2, a failure 1, Ctrl-C 130, a pre-emption 75, SIGTERM in a run 143, and 79 a rank whose phase
    has a smaller batch from now on. `is_debug` adds the traceback, and lets ops check what only the device knows.
    """
    logger.is_debug = is_debug
    _open_closed_streams()
    try:
        return command()
    except CarambaError as error:
        if is_debug:
            traceback.print_exc()
        print(f"error: {visible(str(error))}", file=sys.stderr)
        return error.exit_status
    except Preempted as stop:
        print(f"stopped by {stop.signal_name}", file=sys.stderr)
        return status_of(stop)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except Exception as error:
        if is_debug:
            traceback.print_exc()
        if isinstance(error, OSError) and _is_of_caches(error):
            print(
                f"error: {error.filename}: {error.strerror}; caches are kept there: set CARAMBA_HOME to a folder "
                "that can be written",
                file=sys.stderr,
            )
            return MISTAKE
        hint = "" if is_debug else " (--debug shows the traceback)"
        full = _full_disk(error)
        text = full or f"{type(error).__name__}: {error}"
        print(f"failed: {visible(text)}{hint}", file=sys.stderr)
        return 1


def _open_closed_streams() -> None:
    """Open standard streams that the parent closed, such as by `>&-`, on the null device.

    Python has None for them, which a library that prints does not expect, and the next file that is opened would get
    their number and with it what C code prints.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDONLY if mode == "r" else os.O_WRONLY)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - lives as long as the process


def _full_disk(error: BaseException) -> str | None:
    """Return a message that names the full file system behind an error, None if the error has another cause."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    texts = [str(item) for item in chain]
    if any(mark in text for text in texts for mark in _FULL_SHM):
        free = shutil.disk_usage(SHM).free // 2**20 if SHM.is_dir() else 0
        return (
            f"shared memory is full ({SHM}: {free} MiB free), through which workers of a data loader send batches; "
            f"free it (df {SHM}), enlarge it (docker --shm-size), or set train.num_workers=0"
        )
    for item in chain:
        if isinstance(item, OSError) and item.errno in _FULL:
            place = f"{os.fsdecode(item.filename)}: " if item.filename else ""
            reason = f"{place}{item.strerror}"
        elif any(
            os.strerror(number) in str(item) for number in _FULL
        ):  # A library that raises its own error.
            reason = str(item)
        else:
            continue
        return f"{reason}; free space on that disk (df -h) and start the command again"
    return None


def _is_of_caches(error: OSError) -> bool:
    """True if the cache folder or one of its parents cannot be written."""
    if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
        return False
    folder = home()
    return error.filename is not None and Path(os.fsdecode(error.filename)) in (folder, *folder.parents)


def status_of(stop: Preempted) -> int:
    """Return the exit status of a run that a signal stopped: 75 asks the system to start it again, 143 does not."""
    return PREEMPTED if stop.signal_name in ("SIGUSR1", "SIGUSR2") else TERMINATED


def exit_process(status: int) -> NoReturn:
    """End this process with `status`; at once, if it is a rank or has a group of its own up."""
    distributed = sys.modules.get("torch.distributed")
    if is_rank() or (distributed is not None and distributed.is_available() and distributed.is_initialized()):
        end_now(status)
    sys.exit(status)


def end_now(status: int) -> NoReturn:
    """End this process after what is registered for its end, and before Python takes itself down.

    Gloo's threads may live on there: a stopped rank leaves its group as it is, for others may hang, and caches of
    DTensor hold a group that has been destroyed. One that lets go of a tensor by then aborts the process ("terminate
    called without an active exception"): PyTorch takes the GIL in a destructor, and Python ends a thread that asks for
    it (pytorch/pytorch#190489).
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader has closed the pipe
            stream.flush()
    os._exit(status)
