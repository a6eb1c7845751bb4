"""How a command ends: errors become one readable text and an exit status, and signals stop a run that can resume."""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import math
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, Self

from caramba.console import logger, print_stderr, visible
from caramba.errors import LONGEST_MESSAGE, BatchReduced, CarambaError, Preempted, clip
from caramba.runs.files import FULL, home
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
_NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP)
"""Errors of a path that no program could open: the user wrote it."""
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
        print_stderr(f"error: {visible(str(error))}")
        return error.exit_status
    except Preempted as stop:
        print_stderr(f"stopped by {stop.signal_name}")
        return status_of(stop)
    except KeyboardInterrupt:
        print_stderr("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except Exception as error:
        if is_debug:
            traceback.print_exc()
        if isinstance(error, OSError) and _is_of_caches(error):
            print_stderr(
                f"error: {error.filename}: {error.strerror}; caches are kept there: set CARAMBA_HOME to a folder "
                "that can be written"
            )
            return MISTAKE
        if isinstance(error, OSError) and error.errno in _NO_PATH:
            place = clip(os.fsdecode(error.filename or ""), 100)
            print_stderr(visible(f"error: {place}: {error.strerror}; give another path"))
            return MISTAKE
        hint = "" if is_debug else " (--debug shows the traceback)"
        full = _full_disk(error)
        text = clip(full or f"{type(error).__name__}: {error}", LONGEST_MESSAGE)
        print_stderr(f"failed: {visible(text)}{hint}")
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
        if isinstance(item, OSError) and item.errno in FULL:
            place = f"{os.fsdecode(item.filename)}: " if item.filename else ""
            reason = f"{place}{item.strerror}"
        elif any(os.strerror(number) in str(item) for number in FULL):  # A library that raises its own error.
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


WANTED_BACK = (signal.SIGUSR1, signal.SIGUSR2)
"""Preemption signals: the system takes its resources back, and may start the run again."""
ENDING = (signal.SIGTERM, *WANTED_BACK, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)
"""Signals that end a process that does not handle them, without Ctrl-C."""
STOPPING = (*ENDING, signal.SIGINT)
"""Every catchable signal that ends a run. SIGPIPE is absent: Python raises an error in its place."""
_MAY_BE_IGNORED = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
"""A shell starts background jobs with the first two ignored, and nohup ignores the third."""
AGAIN_S = 0.05
SAME_PRESS_S = 0.3
"""A Ctrl-C can arrive twice, from the terminal and from a parent such as `timeout` or torchrun."""


class _Request:
    """The stop that was requested, and the phase of work that decides when it takes effect."""

    numbers: tuple[signal.Signals, ...] = ()
    terminals: tuple[int, ...] = ()
    follows = False
    number = 0
    waits = False
    defers = False
    interrupted_at: float | None = None


_request = _Request()


def stop_signal() -> int:
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


class DeferredSignals:
    """Within, Ctrl-C and what would end this process is noted in `heard`, in order, and nothing is raised.

    For code that starts processes: Python drops exceptions of handlers around a fork, and a process whose start is
    interrupted would run unknown. The caller handles deferred signals where every process is known.
    """

    def __init__(self) -> None:
        self.heard: list[int] = []
        self._interrupted_at = -math.inf
        self._handlers = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._handlers.enter_context(handled((signal.SIGINT, *ENDING), lambda number, _: self._note(number)))
        return self

    def _note(self, number: int) -> None:
        if number == signal.SIGINT:
            before, self._interrupted_at = self._interrupted_at, time.monotonic()
            if self._interrupted_at - before < SAME_PRESS_S:
                return
        self.heard.append(number)

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
    """Stop on every catchable signal: at once, or in training at the end of a step.

    Between steps Ctrl-C raises KeyboardInterrupt and every other signal Preempted. In training a signal is only
    recorded, and the step's end saves. A second Ctrl-C raises KeyboardInterrupt at once, and a third one kills.

    A process that `follows` another waits for it outside training, in calls that no Python handler interrupts. There
    SIGUSR1 and SIGUSR2 are ignored, because the leading process reports them, and every other signal kills.

    Python drops exceptions of a handler that runs in a finalizer, in a callback of the garbage collector or around a
    fork. A stop that was dropped there is sent again a moment later. If other code swallows the exception, the next
    signal stops the run.

    Only the main thread receives signals; in any other thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in STOPPING}
    _request.numbers = tuple(
        number
        for number, handler in before.items()
        # None is a handler that was not installed from Python, which could not be restored.
        if handler is not None and not (handler == signal.SIG_IGN and number in _MAY_BE_IGNORED)
    )
    _request.terminals = tuple(number for number in (1, 2) if _is_terminal(number))
    _request.number, _request.waits, _request.defers, _request.follows = 0, False, False, follows
    _request.interrupted_at = None
    heard = _request.numbers
    before_lost, logger.on_lost = logger.on_lost, lambda: _stop(signal.SIGPIPE)
    try:
        _between_steps()
        with _asked_again():
            yield
    finally:
        # A process that continues, as a test or a notebook does, must not stop its next training for this signal.
        _request.numbers, _request.number = (), 0
        logger.on_lost = before_lost
        for number in heard:
            signal.signal(number, before[number])


def listen() -> None:
    """Within `stop_on_signals`, install its handlers again, which a library may have replaced."""
    for number in _request.numbers:
        signal.signal(number, _heard)


@contextlib.contextmanager
def until_step_ends() -> Iterator[None]:
    """Only record signals in this block: the trainer reads `stop_signal` at the end of a step, and saves first.

    Raises:
        KeyboardInterrupt, Preempted: a signal came after the last step, and no `until_recorded` is active.
    """
    _request.waits = True
    listen()
    try:
        yield
    except BaseException:
        _stop_waiting()
        raise
    if not _request.defers:
        _stop_waiting()
        _raise_if_requested()


@contextlib.contextmanager
def until_recorded() -> Iterator[None]:
    """Delay a stop that comes after the last step of training to the end of this block.

    The last step saves no resumable state, so the steps since the last saved one would be lost without the record of
    the finished phase.

    Raises:
        KeyboardInterrupt, Preempted: a signal came after the last step.
    """
    _request.defers = True
    try:
        yield
    finally:
        _request.defers = False
        _stop_waiting()
    _raise_if_requested()


def stop_error(number: int) -> BaseException:
    """Return the exception by which a signal stops a run."""
    name = signal.Signals(number).name
    return KeyboardInterrupt(name) if number == signal.SIGINT else Preempted(name)


def _raise_if_requested() -> None:
    if _request.number and not _request.follows:
        raise stop_error(_request.number)


def _stop_waiting() -> None:
    if _request.waits:
        _request.waits = False
        _between_steps()


def _between_steps() -> None:
    if not _request.follows:
        listen()
        return
    for number in _request.numbers:
        signal.signal(number, signal.SIG_IGN if number in WANTED_BACK else signal.SIG_DFL)


def _heard(number: int, _: Any) -> None:
    if number == signal.SIGHUP:
        _leave_terminal()
    if number == signal.SIGINT and _is_second_press():
        # The next one ends the process in C++ code too, where no Python handler runs.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt
    _stop(number)


def _stop(number: int) -> None:
    if _request.number and (_request.waits or _is_stopping()):
        return  # It stops already, and an exception here would interrupt the save.
    _request.number = _request.number or number
    if not _request.waits:
        raise stop_error(_request.number)
    if _request.number == signal.SIGINT:
        _print_at_once("\nstopping when this step is saved; Ctrl-C again stops at once and loses it\n")


def _is_second_press() -> bool:
    first, now = _request.interrupted_at, time.monotonic()
    if first is None:
        _request.interrupted_at = now
        return False
    return now - first >= SAME_PRESS_S


def _print_at_once(text: str) -> None:
    """Write to stderr without its buffer, which a signal handler must not enter."""
    if not logger.quiet:
        with contextlib.suppress(OSError):  # The reader is gone, and the message with it.
            os.write(2, text.encode())


def _leave_terminal() -> None:
    """Discard output to a terminal that was closed: writing to it fails, and would end the step before its save."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in _request.terminals:
        os.dup2(nowhere, number)
    os.close(nowhere)


def _is_terminal(number: int) -> bool:
    try:
        return os.isatty(number)
    except OSError:  # The descriptor is closed.
        return False


def _is_stopping() -> bool:
    """True if a stop is propagating: this was called within a `finally` or `except` that it passes through."""
    error = sys.exception()
    while error is not None and not isinstance(error, Preempted | KeyboardInterrupt):
        error = error.__context__
    return error is not None


@contextlib.contextmanager
def _asked_again() -> Iterator[None]:
    """Within, what Python tells of a stop or Ctrl-C that it drops sends the signal once more."""
    before, main, process = sys.unraisablehook, threading.main_thread(), os.getpid()

    def resend(what: Any) -> None:
        is_stop = issubclass(what.exc_type, (Preempted, KeyboardInterrupt))
        if not is_stop or threading.current_thread() is not main or os.getpid() != process:
            before(what)
            return
        number = signal.SIGINT if what.exc_type is KeyboardInterrupt else _request.number
        # Not from here, where it would be dropped as well.
        again = threading.Timer(AGAIN_S, signal.pthread_kill, (main.ident, number))
        again.daemon = True
        again.start()

    sys.unraisablehook = resend
    try:
        yield
    finally:
        sys.unraisablehook = before
