"""The state of a run, read from its files alone: fast enough for a thousand runs, and safe while they run."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caramba.result import Check
from caramba.runs.events import EVENTS, RUN_STARTED
from caramba.runs.files import is_locked
from caramba.runs.jobs import waits_since
from caramba.runs.manifest import MANIFEST

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

    A verification that ended a run is in its result too; its verdict is final unless training changes.
    """
    if _result_status(run) != FAILED:
        return ()
    try:
        result = json.loads((run / RESULT).read_text(encoding="utf-8"))
        parts = [result]
        if "groups" in result:  # none of its groups was ended by a verification, or it would not be there
            parts = [
                json.loads((run / "groups" / name / RESULT).read_text(encoding="utf-8"))
                for name in result["groups"]
            ]
        failed = [
            str(bench["id"]) for part in parts for bench in part["benchmarks"] if bench["error"] is not None
        ]
        verdicts = [verdict for part in parts for verdict in part["verdicts"] if verdict["fail_fast"]]
        checks = [Check(**check) for verdict in verdicts for check in verdict["checks"]]
    except (OSError, ValueError, KeyError, TypeError):
        return ()  # of an older form, or damaged
    return tuple(dict.fromkeys(failed)) if all(check.passed for check in checks) else ()


def lacks_benchmarks(run: Path) -> bool:
    """Whether a run has its result, and what failed of it are benchmarks alone: a resume tries those again, and what
    was trained stays."""
    return bool(list_failed_benchmarks(run))


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
