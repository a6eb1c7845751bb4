"""`launcher=slurm`: a run's script written and submitted, and the front end gone; `slurm_sbatch_only` writes it."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from caramba.config.manifest import Manifest
from caramba.console import print_stderr
from caramba.errors import CarambaError, ConfigError, nearest
from caramba.launch.launchers.torchrun import LOGS, ranks_per_node
from caramba.runs import MANIFEST
from caramba.runs.environment import output_of
from caramba.runs.files import write_whole
from caramba.runs.state import REQUEUE, last_event_time, record_submission

_TIMEOUT_S = 60


def check_slurm(manifest: Manifest) -> None:
    """Check that a job can be submitted from here.

    Raises:
        ConfigError: no sbatch, or ranks that nothing joins.
    """
    ranks_per_node(manifest)
    if manifest.launcher.type == "slurm" and shutil.which("sbatch") is None:
        raise ConfigError(
            "launcher=slurm: sbatch is not on PATH, so this is no machine of a SLURM cluster; log in to one, or use "
            "launcher=slurm_sbatch_only, which writes the script"
        )


def submit_run(run_dir: Path, manifest: Manifest, flags: list[str]) -> int:
    """Write the script of a run, submit it with launcher=slurm, and print how to follow it."""
    script = run_dir / SCRIPT
    (run_dir / LOGS).mkdir(exist_ok=True)
    write_whole(script, run_script(run_dir, manifest, flags))
    last = last_event_time(run_dir)  # asked before: the job may begin at once
    number = submit(script, manifest)
    if number is not None:
        record_submission(run_dir, number, last)
        print(f"submitted SLURM job {number}: {run_dir}")
        print_stderr(f"follow it with: caramba status, or tail -F {run_dir / LOGS}/rank-0.log")
    return 0


def submit(script: Path, manifest: Manifest) -> str | None:
    """Hand a script to sbatch and return the number of its job; None when it is only to be written.

    Raises:
        ConfigError: sbatch refuses it; its words, and the key that they are about.
        CarambaError: sbatch does not answer.
    """
    if manifest.launcher.type == "slurm_sbatch_only":
        print(f"submit with: sbatch {script}")
        return None
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CarambaError(
            f"sbatch: no answer within {_TIMEOUT_S} s; is slurmctld up? (squeue tells whether {script} is queued)"
        ) from None
    if done.returncode:
        said = " ".join(done.stderr.replace("sbatch: error:", "").split())
        raise ConfigError(f"sbatch refused the job: {said}{_hint(said, manifest)}")
    return done.stdout.strip().partition(";")[0]


def _hint(said: str, manifest: Manifest) -> str:
    """Return which key a refusal is about, and what would be accepted."""
    cluster, words = manifest.cluster, said.lower()
    if "partition" in words:
        known = _partitions()
        close = nearest(cluster.partition, known) if cluster.partition else ""
        return f"; cluster.partition={cluster.partition}{close or ';'} partitions: {', '.join(known) or 'none found'}"
    if "account" in words:
        return f"; cluster.account={cluster.account} (sacctmgr show associations lists yours)"
    if "generic resource" in words or "gres" in words or "gpu" in words:
        return f"; cluster.gpus={cluster.gpus} (0 asks for none; sinfo -o '%P %G' lists what there is)"
    if "time" in words:
        return f"; cluster.time={cluster.time} (sinfo -o '%P %l' lists the limits)"
    if "node configuration" in words or "cpu" in words or "memory" in words:
        return (
            f"; asked for: launcher.nodes={manifest.launcher.nodes or 1}, {ranks_per_node(manifest)} ranks on each, "
            f"cluster.cpus_per_task={cluster.cpus_per_task}, cluster.mem={cluster.mem}, cluster.gpus={cluster.gpus}"
        )
    return ""


def _partitions() -> list[str]:
    return sorted(set((output_of(["sinfo", "--noheader", "--format=%R"]) or b"").decode().split()))


SCRIPT, RUNS = "sbatch.sh", "runs.txt"
SIGNAL, SIGNAL_S = "USR2", 180  # USR1 is taken by NCCL


def run_script(run_dir: Path, manifest: Manifest, flags: list[str]) -> str:
    """Return the script of one run, on as many nodes and ranks as its manifest asks for."""
    lines = _options(manifest, f"{run_dir}/{LOGS}/slurm-%j.log")
    return _script(manifest, flags, lines, [f"run={shlex.quote(str(run_dir))}"], run_dir / SCRIPT)


def array_script(folder: Path, manifest: Manifest, flags: list[str], tasks: list[int]) -> str:
    """Return the script of an array: task N runs the directory on line N + 1 of runs.txt."""
    most = f"%{manifest.launcher.n_jobs}" if manifest.launcher.n_jobs else ""
    lines = _options(manifest, f"{folder}/{LOGS}/slurm-%A_%a.log")
    lines.append(f"--array={_ranges(tasks)}{most}")
    select = f'run=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {shlex.quote(str(folder / RUNS))})'
    return _script(manifest, flags, lines, [select], folder / SCRIPT)


def _options(manifest: Manifest, log: str) -> list[str]:
    launcher, cluster = manifest.launcher, manifest.cluster
    ranks = ranks_per_node(manifest)
    options = [
        f"--job-name={manifest.name}",
        f"--chdir={Path.cwd()}",
        f"--output={log}",
        "--open-mode=append",
        f"--nodes={launcher.nodes or 1}",
        f"--ntasks-per-node={ranks}",
        "--no-requeue" if launcher.requeue is False else "--requeue",
        f"--signal={SIGNAL}@{launcher.signal_s or SIGNAL_S}",
    ]
    gpus = cluster.gpus
    if gpus is None and manifest.device in ("auto", "cuda"):
        gpus = ranks
    asked = {
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "time": cluster.time,
        "gpus-per-node": gpus or None,
        "cpus-per-task": cluster.cpus_per_task,
        "mem": cluster.mem,
        "constraint": cluster.constraint,
    }
    options += [f"--{name}={value}" for name, value in asked.items() if value is not None]
    return [*options, *cluster.options]


def _script(manifest: Manifest, flags: list[str], options: list[str], select: list[str], script: Path) -> str:
    cluster, launcher = manifest.cluster, manifest.launcher
    _refuse_line_breaks([*options, str(script), sys.executable])
    step = [
        *("srun", "--kill-on-bad-exit=1", "--open-mode=append"),
        *([f"--cpus-per-task={cluster.cpus_per_task}"] if cluster.cpus_per_task else []),
        f'--output="$run/{LOGS}/rank-%t.log"',
        *(shlex.quote(word) for word in (sys.executable, "-m", "caramba.worker")),
        f'"$run/{MANIFEST}"',
        *flags,
    ]
    threads = launcher.threads or cluster.cpus_per_task
    lines = [
        "#!/bin/bash",
        f"# Runs what caramba froze. Edit it as you like; submit it again with: sbatch {shlex.quote(str(script))}",
        *(f"#SBATCH {shlex.quote(option)}" for option in options),
        "",
        *select,
        *(f"module load {shlex.quote(name)}" for name in cluster.modules),
        *([f"export OMP_NUM_THREADS={threads}"] if threads else []),
        *(f"export {name}={shlex.quote(value)}" for name, value in cluster.env.items()),
        "export CARAMBA_RANKS=slurm",
        'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))",
        "",
        "trap : TERM USR1 USR2  # the worker saves its state on these, and this shell waits for it",
        " ".join(step),
        "status=$?",
    ]
    if launcher.requeue is not False:
        lines += [
            f'if [ -e "$run/{REQUEUE}" ]; then  # stopped before its time was up: to be gone on with in place',
            f'  rm "$run/{REQUEUE}"',
            '  scontrol requeue "$SLURM_JOB_ID"',
            "fi",
        ]
    return "\n".join([*lines, 'exit "$status"', ""])


def _refuse_line_breaks(values: list[str]) -> None:
    """Raise when a value, such as the folder of the run, would begin a line of its own where a comment holds it."""
    for value in values:
        if "\n" in value or "\r" in value:
            raise ConfigError(
                f"{value!r} holds a line break, which a line of SLURM's script cannot; launch from another folder"
            )


def _ranges(tasks: list[int]) -> str:
    """Write numbers as SLURM does: 0-3,7."""
    parts: list[list[int]] = []
    for task in sorted(tasks):
        if parts and parts[-1][-1] == task - 1:
            parts[-1].append(task)
        else:
            parts.append([task])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
