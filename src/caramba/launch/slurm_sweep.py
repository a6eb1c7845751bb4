"""A sweep as one SLURM array: every point a task that runs a frozen manifest, submitted in one go."""

from __future__ import annotations

import sys
from pathlib import Path

from caramba.config.manifest import Manifest
from caramba.errors import ConfigError
from caramba.launch.sbatch import RUNS, SCRIPT, array_script
from caramba.launch.slurm import submit
from caramba.launch.sweep_runner import SweepRunner
from caramba.launch.torchrun import LOGS
from caramba.runs import differences, lock
from caramba.runs.files import remove_parts, write_whole
from caramba.runs.jobs import record_job, record_submission, refuse_queued
from caramba.runs.shell import show_path
from caramba.runs.state import RUNNING, WAITING, last_event_time
from caramba.runs.sweeps import Sweep


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
            todo = [point for point in self.unfinished() if point.state != RUNNING]
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
            print(f"follow it with: caramba status {folder}; caramba collect {folder}", file=sys.stderr)
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
