"""The state of a run, read from its files alone, and its SLURM job: fast, and safe while runs are running."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caramba.errors import CarambaError, ConfigError
from caramba.result import Check
from caramba.runs.events import EVENTS, RUN_STARTED
from caramba.runs.files import is_locked, write_json
from caramba.runs.manifest import MANIFEST
from caramba.runs.ranks import FROM_SLURM

if TYPE_CHECKING:
    from caramba.config.manifest import Manifest


RESULT = "result.json"
RUNNING, FINISHED, FAILED, INTERRUPTED, WAITING = "running", "finished", "failed", "interrupted", "waiting"
# Events of a worker about the whole run, in order.
STARTED, ENDED_WELL, ENDED_BADLY, STOPPED = RUN_STARTED, "run_finished", "run_failed", "run_interrupted"
_TAIL_BYTES = 65536
CLOCK_SKEW_S = 60.0
_STATUS = re.compile(rb'"status":\s*"(\w+)"')


@dataclass(frozen=True)
class RunState:
    """The state of a run. `step` of `steps` is that of the phase; `updated` and `started` are Unix times.

    `job` is its state in SLURM's queue, if that was queried.
    """

    run: Path
    state: str
    phase: str | None
    step: int
    steps: int | None
    started: float
    updated: float
    error: str | None = None
    job: str | None = None

    @property
    def name(self) -> str:
        return f"{self.run.parent.name}/{self.run.name}"

    @property
    def age_s(self) -> float:
        """Seconds since the last update; negative when the clock of the files is ahead of this one."""
        return time.time() - self.updated


def run_state(run: Path, *, is_queued: bool | None = None) -> RunState:
    """Read the state of a run directory.

    It is running while a worker holds its lock; waiting when none has begun, or it was handed to a SLURM job since;
    finished or failed when it has a result, or a worker's event for it; otherwise, or if a worker that tried failed
    benchmarks again was interrupted, interrupted. `is_queued` is whether the job still is, None if not queried.
    """
    started = (run / MANIFEST).stat().st_mtime
    logs = [file for file in (run / EVENTS, *run.glob(f"groups/*/{EVENTS}")) if file.is_file()]
    logs.sort(key=lambda file: file.stat().st_mtime)
    last = _last_of_run(run / EVENTS)
    is_queued = awaits_job(run) if is_queued is None else is_queued
    state = _state(run, last, has_begun=bool(logs), is_queued=is_queued)
    metrics = next((event for file in reversed(logs) for event in tail(file) if _is_step(event)), None)
    phase = str(metrics["phase"]) if metrics else None
    return RunState(
        run,
        state,
        phase,
        int(metrics["step"]) if metrics else 0,
        _steps(run, phase) if phase else None,
        started,
        max([started, *(file.stat().st_mtime for file in logs)]),
        str(last.get("error")) if state == FAILED and last and last.get("error") else None,
    )


def last_event_time(run: Path) -> float | None:
    """Return the time of a run's last event, None without events; a later time means new events."""
    if not (run / EVENTS).is_file():
        return None
    return next((event["time"] for event in tail(run / EVENTS) if "time" in event), None)


def awaits_job(run: Path) -> bool:
    """Whether a run was handed to a SLURM job, and no worker has begun with it since."""
    return waits_since(run, last_event_time(run))


def lost_checkpoints(run: Path) -> list[Path]:
    """Return the weights of finished stages of a run, and of its groups, that are no longer there."""
    lost: list[Path] = []
    for file in (*run.glob("stages/*.json"), *run.glob("groups/*/stages/*.json")):
        try:
            name = json.loads(file.read_text(encoding="utf-8"))["phase"]["checkpoint"]
        except (OSError, ValueError, KeyError, TypeError):
            lost.append(file)  # of an older form, or damaged: which weights they were is not known
            continue
        if name and not (file.parents[1] / name).exists():
            lost.append(file.parents[1] / name)
    return lost


def list_failed_benchmarks(run: Path) -> tuple[str, ...]:
    """Return the benchmarks that failed of a run that has its result and lacks nothing else, else none.

    A resume tries these again, and what was trained stays. A verification that ended a run is in its result too; its
    verdict is final unless training changes.
    """
    if _result_status(run) != FAILED:
        return ()
    try:
        result = json.loads((run / RESULT).read_text(encoding="utf-8"))
        parts = [result]
        if "groups" in result:  # none of its groups was ended by a verification, or it would not be there
            parts = [
                json.loads((run / "groups" / name / RESULT).read_text(encoding="utf-8")) for name in result["groups"]
            ]
        failed = [str(bench["id"]) for part in parts for bench in part["benchmarks"] if bench["error"] is not None]
        verdicts = [verdict for part in parts for verdict in part["verdicts"] if verdict["fail_fast"]]
        checks = [Check(**check) for verdict in verdicts for check in verdict["checks"]]
    except (OSError, ValueError, KeyError, TypeError):
        return ()  # of an older form, or damaged
    return tuple(dict.fromkeys(failed)) if all(check.passed for check in checks) else ()


def select_retries(manifest: Manifest, failed: Iterable[str]) -> tuple[str, ...]:
    """Return which of the benchmarks that failed a resume tries again, in order.

    What fails under the name of a whole ladder, or of all controls, is that its model is not there, which no resume
    changes.
    """
    from caramba.config.benchmark import STAGED  # with pydantic, which commands over many runs do not need

    benchmarks = [bench for group in manifest.groups_to_run() for bench in group.benchmarks]
    return tuple(sorted(set(failed) - {bench.id for bench in benchmarks if isinstance(bench.config, STAGED)}))


def clock_skew(run: Path) -> str | None:
    """Return a warning if a run's files are ahead of this machine's clock, else None."""
    ahead = -run_state(run).age_s
    if ahead <= CLOCK_SKEW_S:
        return None
    return (
        f"{run}: its files are {ahead:.0f} s ahead of this machine's clock: the clocks differ, and times and ages of "
        "this run are wrong by as much; set the clock (NTP)"
    )


def tail(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the last events of a file, newest first; incomplete lines are skipped."""
    with open(file, "rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - _TAIL_BYTES))
        lines = stream.read().splitlines()
    for line in reversed(lines if size <= _TAIL_BYTES else lines[1:]):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def _last_of_run(file: Path) -> dict[str, Any] | None:
    ends = (STARTED, ENDED_WELL, ENDED_BADLY, STOPPED)
    if not file.is_file():
        return None
    return next((event for event in tail(file) if event.get("event") in ends), None)


def _state(run: Path, last: dict[str, Any] | None, *, has_begun: bool, is_queued: bool) -> str:
    if is_locked(run):
        return RUNNING
    if is_queued:
        return WAITING
    said = last["event"] if last else None
    status = _result_status(run)
    if said == ENDED_BADLY:
        return FAILED
    if status == FINISHED:
        return FINISHED
    if status == FAILED and said not in (
        STARTED,
        STOPPED,
    ):  # else benchmarks are tried again, and result.json is of before
        return FAILED
    return INTERRUPTED if has_begun or (run / "plan.json").exists() else WAITING


def _result_status(run: Path) -> str | None:
    """Return the status at the beginning of result.json: the rest may be megabytes of rows."""
    try:
        with open(run / RESULT, "rb") as file:
            found = _STATUS.search(file.read(256))
    except FileNotFoundError:
        return None
    return found[1].decode() if found else None


def _is_step(event: dict[str, Any]) -> bool:
    return event.get("event") == "metrics" and "phase" in event and isinstance(event.get("step"), int)


def _steps(run: Path, phase: str) -> int | None:
    """Return the planned steps of a phase, from plain JSON: a run of an older schema has a state too."""
    try:
        plain = json.loads((run / MANIFEST).read_text(encoding="utf-8"))
        runs = [item for group in plain["groups"] for item in group["runs"]]
        return next((int(item["train"]["steps"]) for item in runs if item["id"] == phase), None)
    except (OSError, ValueError, KeyError, TypeError):
        return None


JOB, AFTER = "slurm.json", "after"
REQUEUE = "requeue"
"""Left in a run by a worker that a signal stopped: our script queues its job again and removes it."""
ALIVE = frozenset(
    (
        *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING"),
        *("REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "STAGE_OUT"),
    )
)
"""States of a job that still runs or will run; in any other it has ended."""
_TIMEOUT_S = 20


@dataclass(frozen=True)
class QueuedJob:
    """A job as the queue has it: its number (`12`, or `12_3` of an array), its state and why it waits."""

    number: str
    state: str
    reason: str

    @property
    def is_alive(self) -> bool:
        return self.state in ALIVE

    def __str__(self) -> str:
        why = f" ({self.reason})" if self.reason not in ("None", "", "N/A") else ""
        return f"SLURM job {self.number} {self.state}{why}"


def current_job(variables: Mapping[str, str] = os.environ) -> str | None:
    """Return the number of the SLURM job that our own script started this process in, or None."""
    if variables.get(FROM_SLURM) != "slurm":
        return None
    if "SLURM_ARRAY_JOB_ID" in variables:
        return f"{variables['SLURM_ARRAY_JOB_ID']}_{variables['SLURM_ARRAY_TASK_ID']}"
    return variables.get("SLURM_JOB_ID")


def record_job(run_dir: Path, number: str | None = None) -> None:
    """Keep the number of the job that a run is in: a given one, else that of this process, if it is in one."""
    number = number or current_job()
    if number is not None and read_job(run_dir) != number:
        write_json(run_dir / JOB, {"job": number})


def record_submission(run_dir: Path, number: str, after: float | None) -> None:
    """Store the SLURM job of a submitted run, with the time of the run's last event.

    Until a later event the run waits for that job, whatever its earlier state.
    """
    write_json(run_dir / JOB, {"job": number, AFTER: after})


def read_job(run_dir: Path) -> str | None:
    """Return the number of the job that a run was last in, or None."""
    record = _record(run_dir)
    return None if record is None else str(record["job"])


def waits_since(run_dir: Path, last: float | None) -> bool:
    """True if a run was submitted to a job after its last event, at time `last` (None without events).

    False where the record is damaged; reading the job number reports that.
    """
    try:
        record = _record(run_dir)
    except CarambaError:
        return False
    return record is not None and AFTER in record and record[AFTER] == last


def _record(run_dir: Path) -> dict[str, Any] | None:
    try:
        record = json.loads((run_dir / JOB).read_text(encoding="utf-8"))
        if "job" not in record:
            raise KeyError("job")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CarambaError(f"{run_dir / JOB}: not the record of a job ({error}); remove the file") from None
    return record


def queue() -> dict[str, QueuedJob]:
    """Return this user's jobs by number, those that ended a moment ago among them; none where there is no SLURM.

    Raises:
        CarambaError: SLURM is here and does not answer.
    """
    if shutil.which("squeue") is None:
        return {}
    command = ["squeue", "--me", "--array", "--states=all", "--noheader", "--format=%i|%T|%r"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise CarambaError(f"squeue: no answer within {_TIMEOUT_S} s; is slurmctld up?") from None
    if done.returncode:
        raise CarambaError(f"squeue: {' '.join(done.stderr.split())}")
    rows = [line.split("|", 2) for line in done.stdout.splitlines()]
    return {row[0]: QueuedJob(*row) for row in rows if len(row) == 3}


def refuse_queued(run_dir: Path, what: str = "run") -> None:
    """Check that no SLURM job, waiting or running, has the directory of a run or of another `what`.

    Raises:
        ConfigError: naming the job.
    """
    number = read_job(run_dir)
    if number is None or number == current_job():
        return
    # A sweep has the number of its array, and its tasks are listed as NUMBER_TASK or, waiting, NUMBER_[0-9].
    found = [job for job in queue().values() if job.number.partition("_")[0] == number or job.number == number]
    alive = next((job for job in found if job.is_alive), None)
    if alive is not None:
        raise ConfigError(
            f"{run_dir}: {alive} has this {what}; wait for it (caramba status), or stop it first: scancel {number}"
        )
