"""`caramba status [DIR]`: the state of every run and sweep."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

from caramba.console import align_columns
from caramba.errors import ConfigError, visible
from caramba.launch.commands.arguments import CommandArguments
from caramba.runs.index import read_states
from caramba.runs.minting import runs_below
from caramba.runs.state import (
    CLOCK_SKEW_S,
    FAILED,
    FINISHED,
    RUNNING,
    WAITING,
    QueuedJob,
    RunState,
    queue,
    read_job,
    run_state,
)
from caramba.runs.sweeps import Sweep, list_sweeps, read_sweep


def main(argv: list[str]) -> int:
    """Print a line per sweep and per run, the newest last.

    Raises:
        ConfigError: the folder is not there.
    """
    parser = CommandArguments("status")
    parser.add_argument("folder", nargs="?", default="runs")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    _queue.cache_clear()
    folder = Path(args.folder).expanduser()
    if not folder.is_dir() and (Path("runs") / folder).is_dir():
        folder = Path("runs") / folder
    if not folder.is_dir():
        raise ConfigError(
            f"status: {args.folder}: no such folder; give one with runs, or start one with caramba launch"
        )
    sweeps = [read_sweep(item) for item in list_sweeps(folder)]
    read = read_states(folder, _runs(folder, sweeps))
    for sweep in sweeps:
        sweep.refresh({state.run: state.state for state in read})
    states = [_in_queue(state) for state in read]
    if args.json:
        print(
            json.dumps({"sweeps": [_plain_sweep(item) for item in sweeps], "runs": [_plain(item) for item in states]})
        )
        return 0
    for sweep in sweeps:
        print(_sweep_line(sweep))
    rows = [("run", "state", "phase", "step", "last sign", "")] + [_cells(state) for state in states]
    if states:
        print(align_columns(rows))
    if not states and not sweeps:
        print(f"no runs under {folder.absolute()}")
    return 0


@functools.cache
def _queue() -> dict[str, QueuedJob]:
    """The queue, asked once and only when a run was submitted."""
    return queue()


def _runs(folder: Path, sweeps: list[Sweep]) -> list[Path]:
    """Return the runs of a folder: of `runs`, of `runs/NAME`, of one run, or those that a sweep refers to."""
    if len(sweeps) == 1 and sweeps[0].folder == folder.absolute():
        return [run for point in sweeps[0].points if (run := sweeps[0].run_of(point)) is not None]
    return runs_below(folder)


def _in_queue(state: RunState) -> RunState:
    """Add SLURM's state of a submitted run that has not ended: not every file system shows its lock here."""
    if state.state in (FINISHED, FAILED) or (number := read_job(state.run)) is None:
        return state
    found = _queue().get(number)
    if state.state == WAITING and (found is None or not found.is_alive):
        state = run_state(state.run, is_queued=False)  # the job ended before a worker began
    if found is None:
        return dataclasses.replace(state, job=f"SLURM job {number} is no longer in the queue")
    name = RUNNING if found.state in ("RUNNING", "COMPLETING") else state.state
    return dataclasses.replace(state, state=WAITING if found.state == "PENDING" else name, job=str(found))


def _cells(state: RunState) -> tuple[str, ...]:
    steps = f"{state.step}/{state.steps}" if state.steps is not None else str(state.step) if state.phase else ""
    note = " ".join((state.error or state.job or "").split())
    name = visible(state.name).replace("\n", "\\n").replace("\t", "\\t")
    return (name, state.state, state.phase or "", steps, _age(state.age_s), note[:100])


def _age(seconds: float) -> str:
    if seconds < -CLOCK_SKEW_S:
        return f"in {-seconds:.0f} s: the clocks differ"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


def _sweep_line(sweep: Sweep) -> str:
    counts = ", ".join(f"{count} {state}" for state, count in sweep.counts().items())
    points = f"{len(sweep.points)} {'point' if len(sweep.points) == 1 else 'points'}"
    return f"sweep {sweep.folder.parents[1].name}/sweeps/{sweep.folder.name}: {points}, {counts}"


def _plain_sweep(sweep: Sweep) -> dict[str, object]:
    return {"sweep": str(sweep.folder), "points": len(sweep.points), **sweep.counts()}


def _plain(state: RunState) -> dict[str, object]:
    return {
        "run": str(state.run),
        "state": state.state,
        "phase": state.phase,
        "step": state.step,
        "steps": state.steps,
        "age_s": round(state.age_s, 1),
        "error": state.error,
        "job": state.job,
    }
