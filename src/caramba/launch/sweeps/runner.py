"""Run the points of a sweep that have not finished, and record how each ended; a SLURM array submits them."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

from caramba.config.manifest import Manifest
from caramba.config.parallel import LauncherConfig
from caramba.console import print_stderr
from caramba.errors import ConfigError
from caramba.launch.launchers.process import Job, LiveWorker, Pool, last_lines, make_slots
from caramba.launch.launchers.slurm import RUNS, SCRIPT, array_script, submit
from caramba.launch.launchers.torchrun import LOGS
from caramba.launch.run import check_launcher, start_worker
from caramba.runs import differences, lock, mint, read_manifest
from caramba.runs.exit_codes import INTERRUPTED as INTERRUPTED_STATUS
from caramba.runs.exit_codes import MISTAKE, STOPPED
from caramba.runs.files import holder_of, is_locked, remove_parts, write_whole
from caramba.runs.manifest import check_plugins_match
from caramba.runs.shell import show_path
from caramba.runs.state import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    RESULT,
    RUNNING,
    WAITING,
    last_event_time,
    list_failed_benchmarks,
    record_job,
    record_submission,
    refuse_queued,
    run_state,
)
from caramba.runs.sweeps import Point, Sweep

CONTINUE = "continue"


class SweepRunner:
    """Run the points of a sweep, by `launcher`, from one process."""

    def __init__(self, sweep: Sweep, launcher: LauncherConfig, flags: list[str]) -> None:
        self.sweep, self.launcher, self.flags = sweep, launcher, flags
        self.new_runs: set[Path] = set()
        self.failed_now = 0

    @property
    def total(self) -> int:
        """How many points the sweep has when all of them are known."""
        return len(self.sweep.points)

    def resume(self) -> int:
        """Run every point that has not finished; return the exit status of the sweep.

        Raises:
            ConfigError: another process drives this sweep, or the source of a plugin has changed since a point ran.
        """
        with lock(self.sweep.folder, "sweep"):
            remove_parts(self.sweep.folder)
            self.sweep.refresh()
            self.sweep.save()
            self.refuse_other_plugins()
            self._print_pending()
            is_interrupted = self.run_pending()
            self.sweep.refresh()
            self.sweep.save()
        return self.report(is_interrupted=is_interrupted)

    def refuse_other_plugins(self) -> None:
        """Raise where a point ran with other source of a plugin than there is now."""
        listed = ((self.sweep.run_of(point), point) for point in self.sweep.points)
        check_plugins_match(
            (run, functools.partial(self.sweep.manifest, point)) for run, point in listed if run is not None
        )

    def run_pending(self) -> bool:
        """Run the points that have not finished; return whether the user stopped it."""
        todo = self.list_unfinished()
        devices = {self.sweep.manifest(point).device for point in todo}
        return self.run(todo, len(todo), devices.pop() if len(devices) == 1 else "auto")

    def list_unfinished(self) -> list[Point]:
        """Return the points that have not finished: first those that a worker runs already."""
        points = [point for point in self.sweep.points if point.state != FINISHED]
        return sorted(points, key=lambda point: point.state != RUNNING)

    def on_end(self, point: Point) -> None:
        """Called when a point has ended, however it did, once that is on record."""

    def run(self, todo: Iterable[Point], most: int, device: str) -> bool:
        """Run points, `most` at a time at most, and record how each ended; return whether the user stopped it.

        A point that a worker of an earlier front end runs is waited for, and runs here if that did not finish it.
        """
        again: list[Point] = []
        try:
            while most > 0:
                for point, job, status in self._endings(todo, most, device):
                    # A worker that was starting when its front end was killed, and locked the run before ours did.
                    is_taken = status == MISTAKE and is_locked(job.run_dir)
                    if is_taken or (job.is_live and status in STOPPED):
                        point.state = INTERRUPTED
                        again.append(point)
                        continue
                    self._record(point, job, status)
                    if self.launcher.type != "process" and status in STOPPED:
                        return True
                todo, most, again = again, len(again), []
        except KeyboardInterrupt:
            return True
        return False

    def _endings(self, todo: Iterable[Point], most: int, device: str) -> Iterator[tuple[Point, Job, int]]:
        is_pool = self.launcher.type == "process"
        started = self._in_processes(todo, most, device) if is_pool else self._in_turn(todo)
        with contextlib.closing(started) as endings:  # Closing stops the workers that still run.
            for job, status in endings:
                yield self.sweep.points[job.number], job, status

    def _in_turn(self, todo: Iterable[Point]) -> Generator[tuple[Job, int], None, None]:
        for job in self._jobs(todo):
            if job.is_live:
                yield job, LiveWorker(job.run_dir).wait()
            else:
                yield job, start_worker(job.run_dir, read_manifest(job.run_dir), list(job.flags))

    def _in_processes(self, todo: Iterable[Point], most: int, device: str) -> Generator[tuple[Job, int], None, None]:
        slots = make_slots(self.launcher, most, device)
        with Pool(slots) as pool:
            yield from pool.run(self._jobs(todo))

    def _jobs(self, todo: Iterable[Point]) -> Iterator[Job]:
        """Yield the points in turn, each with its directory made and on record, when there is room for it."""
        for point in todo:
            if self.launcher.on_failure != CONTINUE and self.failed_now:
                return
            place = f"[{point.number + 1}/{self.total}]"
            run = self.sweep.run_of(point)
            if run is not None and is_locked(run):
                point.state = RUNNING
                print_stderr(
                    f"{place} {point.title}  (waiting for process {holder_of(run)}, which runs {show_path(run)})"
                )
                yield Job(point.number, run, self.sweep.log_file(point), tuple(self.flags), is_live=True)
                continue
            run_dir = self._directory(point)
            point.state, point.exit_status, point.error = RUNNING, None, None
            self.sweep.link(point, run_dir)
            self.sweep.save()
            print_stderr(f"{place} {point.title}  ({show_path(run_dir)})")
            yield Job(point.number, run_dir, self.sweep.log_file(point), tuple(self.flags))

    def _directory(self, point: Point) -> Path:
        """Return the directory to resume a point in, or a new one.

        A run with a result is resumed only for missing benchmarks.
        """
        run = self.sweep.run_of(point)
        if run is not None and (not (run / RESULT).exists() or list_failed_benchmarks(run)):
            return run
        run_dir = mint(self.sweep.manifest(point), self._overrides(point), self.sweep.root)
        self.new_runs.add(run_dir)
        return run_dir

    def _overrides(self, point: Point) -> list[str]:
        own = {_key(word) for word in point.overrides}
        return [*point.overrides, *(word for word in self.sweep.overrides if _key(word) not in own)]

    def _record(self, point: Point, job: Job, status: int) -> None:
        found = run_state(job.run_dir)
        point.exit_status = status
        point.state = FINISHED if status == 0 else INTERRUPTED if status in STOPPED else FAILED
        if status < 0:  # a signal ended it: it resumes from its saved state
            point.state, point.error = INTERRUPTED, f"ended by signal {-status}"
        if point.state == FAILED:
            self.failed_now += 1
            point.error = found.error or last_lines(self.sweep.log_file(point)) or f"exit status {status}"
            if status == MISTAKE and job.run_dir in self.new_runs and not (job.run_dir / "plan.json").exists():
                shutil.rmtree(job.run_dir)  # the data or the device did not fit: nothing can be resumed
                point.runs.pop()
        self.sweep.save()
        if self.launcher.type == "process" or point.state != FINISHED:
            print_stderr(f"  {point.state}: {point.title}")
        self.on_end(point)

    def _print_pending(self) -> None:
        counts = self.sweep.counts()
        if any(point.runs for point in self.sweep.points):
            listed = ", ".join(f"{count} {state}" for state, count in counts.items())
            print_stderr(f"resuming {show_path(self.sweep.folder)}: {listed}")
        else:
            print_stderr(f"sweep of {self.total} points: {show_path(self.sweep.folder)}")

    def report(self, *, is_interrupted: bool) -> int:
        """Print the state of the sweep and the last lines of what failed; return its exit status."""
        bad = [point for point in self.sweep.points if point.state == FAILED]
        for point in bad:
            tail = "\n    ".join((point.error or "").splitlines())
            print_stderr(f"failed: {point.title} (exit status {point.exit_status})\n    {tail}")
        counts = self.sweep.counts()
        listed = ", ".join(f"{count} {state}" for state, count in counts.items())
        total = len(self.sweep.points)
        print_stderr(f"sweep: {counts.get(FINISHED, 0)} of {total} points finished ({listed})")
        folder = show_path(self.sweep.folder)
        if is_interrupted:
            print_stderr(f"interrupted; resume with: caramba resume {folder}")
            return INTERRUPTED_STATUS
        if counts.get(FINISHED, 0) < total:
            others = total - counts.get(FINISHED, 0) - len(bad)
            also = f", {others} did not finish" if others else ""
            print_stderr(f"{len(bad)} of {total} points failed{also}; try again with: caramba resume {folder}")
            return 1
        print_stderr(f"collect with: caramba collect {folder}")
        return 0


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def refuse_unlike(first: Manifest, other: Manifest, other_name: str) -> None:
    """Check that two points can be tasks of one array, whose script asks for the same for each of them.

    Raises:
        ConfigError: the keys in which what they ask of SLURM differs.
    """
    types = first.launcher.type, other.launcher.type
    if types[0] == types[1] and (not first.launcher.is_slurm or _asked(first) == _asked(other)):
        return
    keys = {"launcher": True, "cluster": True, "device": True, "parallel": {"strategy", "dp", "tp"}}
    ours, theirs = (item.model_dump(mode="json", include=keys) for item in (first, other))
    changed = "; ".join(differences(ours, theirs))
    raise ConfigError(
        f"launcher={types[0]}: point {other_name!r} asks for other things than the first ({changed}), and all points "
        "of a sweep are started alike; make a sweep for each value"
    )


def _asked(manifest: Manifest) -> str:
    """Return the script of an array of a manifest alone, whatever its name."""
    return array_script(Path.cwd(), manifest.model_copy(update={"name": "sweep"}), [], [0])


class ArrayRunner(SweepRunner):
    """Submits what has not finished of a sweep; the array's tasks are the numbers of its points."""

    def __init__(self, sweep: Sweep, manifest: Manifest, flags: list[str]) -> None:
        super().__init__(sweep, manifest.launcher, flags)
        self.manifest = manifest

    def resume(self) -> int:
        """Give every unfinished point its directory and a task, submit the array, and return 0.

        Raises:
            ConfigError: the source of a plugin has changed since a point ran, an array that is queued or runs has this
                sweep, or sbatch refuses the script.
        """
        with lock(self.sweep.folder, "sweep"):
            remove_parts(self.sweep.folder)
            refuse_queued(self.sweep.folder, "sweep")
            self.sweep.refresh()
            self.refuse_other_plugins()
            todo = [point for point in self.list_unfinished() if point.state != RUNNING]
            self._print_pending()
            if not todo:
                self.sweep.save()
                return self.report(is_interrupted=False)
            runs = {point.number: self._directory(point) for point in todo}
            for point in todo:
                (runs[point.number] / LOGS).mkdir(exist_ok=True)
                point.state, point.exit_status, point.error = WAITING, None, None
                self.sweep.link(point, runs[point.number])
            self.sweep.save()
            number = self._submit(runs)
        if number is not None:
            folder = show_path(self.sweep.folder)
            print(f"submitted SLURM array {number} of {len(todo)} points: {folder}")
            print_stderr(f"follow it with: caramba status {folder}; caramba collect {folder}")
        return 0

    def _submit(self, runs: dict[int, Path]) -> str | None:
        folder = self.sweep.folder
        (folder / LOGS).mkdir(exist_ok=True)
        rows = [str(runs.get(point.number, "")) for point in self.sweep.points]
        write_whole(folder / RUNS, "".join(f"{row}\n" for row in rows))
        write_whole(folder / SCRIPT, array_script(folder, self.manifest, self.flags, sorted(runs)))
        last = {task: last_event_time(run_dir) for task, run_dir in runs.items()}  # tasks may begin at once
        number = submit(folder / SCRIPT, self.manifest)
        if number is not None:
            record_job(folder, number)
            for task, run_dir in runs.items():
                record_submission(run_dir, f"{number}_{task}", last[task])
        return number


def runner_of(sweep: Sweep, manifest: Manifest, flags: list[str]) -> SweepRunner:
    """Return what works through a sweep, where the launcher and cluster of `manifest` say."""
    check_launcher(manifest)
    if manifest.launcher.is_slurm:
        return ArrayRunner(sweep, manifest, flags)
    return SweepRunner(sweep, manifest.launcher, flags)
