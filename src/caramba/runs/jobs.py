"""The SLURM job of a run: its number, stored with the run, and its state in the queue."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caramba.errors import CarambaError, ConfigError
from caramba.runs.files import write_json
from caramba.runs.ranks import FROM_SLURM

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
    found = [
        job for job in queue().values() if job.number.partition("_")[0] == number or job.number == number
    ]
    alive = next((job for job in found if job.is_alive), None)
    if alive is not None:
        raise ConfigError(
            f"{run_dir}: {alive} has this {what}; wait for it (caramba status), or stop it first: scancel {number}"
        )
