"""A pool of worker processes: each runs one frozen manifest, on its slot, with its output in a file."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from caramba.config.parallel import LauncherConfig
from caramba.errors import ConfigError
from caramba.launch.preflight import available_cores, threads_each
from caramba.runs import MANIFEST
from caramba.runs.environment import SHARING, output_of
from caramba.runs.exit_codes import INTERRUPTED, DeferredSignals
from caramba.runs.files import holder_of, is_locked, marks_of
from caramba.runs.state import FAILED, FINISHED, run_state

GRACE_S = 30.0
TAIL_LINES = 12
_POLL_S = 0.05


@dataclass(frozen=True)
class Job:
    """A run to work on: the number by which its owner knows it, its directory, and where its output goes.

    Without a log the worker shares the output of this process. `is_live` is true if an earlier worker still runs it.
    """

    number: int
    run_dir: Path
    log: Path | None
    flags: tuple[str, ...] = ()
    is_live: bool = False


@dataclass
class _Running:
    job: Job
    slot: Slot
    process: subprocess.Popen[bytes] | LiveWorker


class Pool(DeferredSignals):
    """Runs jobs, one per slot at a time. Leaving the context stops those that still run, and waits for them.

    Within it, signals are noted, and `run` raises KeyboardInterrupt for them where every worker that was started is
    known.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        super().__init__()
        self.free = list(slots)
        self._running: list[_Running] = []

    def __exit__(self, *error: object) -> None:
        try:
            self.stop()
        finally:
            super().__exit__(*error)

    def run(self, jobs: Iterator[Job]) -> Iterator[tuple[Job, int]]:
        """Start jobs as slots come free, and yield each with its exit status as it ends.

        The next job is asked for when there is a slot for it, and not before.

        Raises:
            KeyboardInterrupt: a signal asked for the end; workers still run then, until `stop`.
        """
        has_more = True
        while has_more or self._running:
            self._raise_if_heard()
            while has_more and self.free:
                job = next(jobs, None)
                if job is not None and job.is_live:  # Known from here on, so that a signal stops it too.
                    self._running.append(self._adopt(job))
                    continue
                self._raise_if_heard()
                if job is None:
                    has_more = False
                else:
                    self._running.append(self._begin(job))
            statuses = [(item, item.process.poll()) for item in self._running]
            ended = [(item, int(status)) for item, status in statuses if status is not None]
            for item, status in ended:
                self._running.remove(item)
                self.free.append(item.slot)
                yield item.job, status
            if not ended and self._running:
                time.sleep(_POLL_S)

    def _begin(self, job: Job) -> _Running:
        slot = self.free.pop(0)
        return _Running(job, slot, _start(job, slot))

    def _adopt(self, job: Job) -> _Running:
        """Wait for the worker of an earlier front end, on the slot of its devices where that is free."""
        worker = LiveWorker(job.run_dir)
        places = [slot.variables.get(DEVICES) for slot in self.free]
        index = places.index(worker.devices) if worker.devices in places else 0
        return _Running(job, self.free.pop(index), worker)

    def _raise_if_heard(self) -> None:
        if self.heard:
            raise KeyboardInterrupt(signal.Signals(self.heard[0]).name)

    def stop(self, grace_s: float | None = None, how: int = signal.SIGINT) -> list[int]:
        """Signal the workers, wait until they have saved, kill those that take too long; return the exit statuses.

        A worker saves at the end of its step, so a stop that a signal requested has no time limit: a second Ctrl-C
        kills the workers at once. No other signal does, because a terminal that closes sends SIGHUP twice, from the
        shell and from the kernel. After an error in this process they have GRACE_S.

        Args:
            grace_s: seconds to wait after SIGINT; default as above.
            how: the signal to send first.
        """
        if grace_s is None:
            grace_s = math.inf if self.heard else GRACE_S
        stopped = list(self._running)
        for number in (how, signal.SIGKILL):
            asked = self.heard.count(signal.SIGINT)
            for item in self._running:
                process = item.process.pid
                if process is None:
                    continue  # A process of the user's own, which nobody asked to stop.
                with contextlib.suppress(ProcessLookupError):
                    # Data loaders end with their worker; a killed one cannot end them, so the whole group is.
                    (os.killpg if number == signal.SIGKILL else os.kill)(process, number)
            self._running = [item for item in self._running if item.process.pid is not None]
            limit = time.monotonic() + grace_s
            if number not in (signal.SIGINT, signal.SIGKILL):
                limit = math.inf
            while self._running and time.monotonic() < limit:
                self._running = [item for item in self._running if item.process.poll() is None]
                if number != signal.SIGKILL and self.heard.count(signal.SIGINT) > asked:
                    break
                time.sleep(_POLL_S)
            if not self._running:
                break
        return [item.process.returncode for item in stopped if item.process.returncode is not None]


def _start(job: Job, slot: Slot) -> subprocess.Popen[bytes]:
    """Start a worker in a session of its own: a Ctrl-C reaches it through us, once."""
    with contextlib.ExitStack() as stack:
        log = None
        if job.log is not None:
            job.log.parent.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context(open(job.log, "ab"))
        return subprocess.Popen(
            [sys.executable, "-m", "caramba.worker", str(job.run_dir / MANIFEST), *job.flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=None if log is None else subprocess.STDOUT,
            env={**os.environ, **slot.variables},
            start_new_session=True,
            pass_fds=marks_of(job.run_dir),
            preexec_fn=_hear_interrupts,
        )


def _hear_interrupts() -> None:
    """A shell that runs us in the background makes us deaf to SIGINT; our workers are stopped by it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_in_process(run_dir: Path, config: LauncherConfig, device: str, flags: Sequence[str]) -> int:
    """Run one worker in a process of its own, with our output, and return its exit status.

    After a signal too, which it is sent as it came, a closed terminal as SIGTERM: only the worker knows how it ended,
    it may have finished, or saved. One that a signal ended then was stopped by what we heard.
    """
    found: list[int] = []
    with Pool(make_slots(config, 1, device)) as pool:
        try:
            for _, status in pool.run(iter([Job(0, run_dir, None, tuple(flags))])):
                found.append(status)
        except KeyboardInterrupt:
            heard = pool.heard[0]
            found += pool.stop(how=signal.SIGTERM if heard == signal.SIGHUP else heard)
            return found[0] if found and found[0] >= 0 else pool.status
    return found[0]


def last_lines(log: Path, count: int = TAIL_LINES) -> str:
    """Return the last lines of a log, empty ones left out."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - 16384))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join([line for line in lines if line.strip()][-count:])


@dataclass(frozen=True)
class Slot:
    """A place for one worker at a time: `variables` is what its environment has besides ours."""

    name: str
    variables: Mapping[str, str]


def make_slots(config: LauncherConfig, n_points: int, device: str = "auto") -> list[Slot]:
    """Return the slots of a pool: `n_jobs`, else one per GPU, else one per core.

    Workers beyond the number of devices share them in turn. Every worker gets an equal share of the cores, so that
    pools of threads do not fight for them.

    Raises:
        ConfigError: devices were named for a run on the CPU.
    """
    if config.devices is not None and device == "cpu":
        raise ConfigError(
            f"launcher.devices={list(config.devices)}: the runs ask for device=cpu; leave out one of the two"
        )
    devices = [str(item) for item in config.devices] if config.devices is not None else []
    if not devices and device in ("auto", "cuda"):
        devices = visible_gpus()
    n_slots = min(config.n_jobs or len(devices) or available_cores(), max(1, n_points))
    threads = threads_each(n_slots, config, os.environ)
    sharing = -(-n_slots // max(len(devices), 1))
    slots: list[Slot] = []
    for number in range(n_slots):
        variables = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), SHARING: str(sharing)}
        if devices:
            variables["CUDA_VISIBLE_DEVICES"] = devices[number % len(devices)]
        place = f"GPU {variables['CUDA_VISIBLE_DEVICES']}" if devices else f"worker {number}"
        slots.append(Slot(place, variables))
    return slots


def visible_gpus() -> list[str]:
    """Return the GPUs that CUDA would see, as it names them, without loading torch: the driver's tool knows."""
    set_by_user = os.environ.get("CUDA_VISIBLE_DEVICES")
    if set_by_user is not None:
        return [name.strip() for name in set_by_user.split(",") if name.strip() not in ("", "-1")]
    text = output_of(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"])
    return [line.strip() for line in (text or b"").decode().splitlines() if line.strip()]


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
