"""`launcher=slurm`: a run's script written and submitted, and the front end gone; `slurm_sbatch_only` writes it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from caramba.config.manifest import Manifest
from caramba.config.names import nearest
from caramba.errors import CarambaError, ConfigError
from caramba.launch.sbatch import SCRIPT, run_script
from caramba.launch.torchrun import LOGS, ranks_per_node
from caramba.runs.files import write_whole
from caramba.runs.jobs import record_submission
from caramba.runs.state import last_event_time

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
    """Write the script of a run, submit it unless it is only to be written, and say how to follow it."""
    script = run_dir / SCRIPT
    (run_dir / LOGS).mkdir(exist_ok=True)
    write_whole(script, run_script(run_dir, manifest, flags))
    last = last_event_time(run_dir)  # asked before: the job may begin at once
    number = submit(script, manifest)
    if number is not None:
        record_submission(run_dir, number, last)
        print(f"submitted SLURM job {number}: {run_dir}")
        print(f"follow it with: caramba status, or tail -F {run_dir / LOGS}/rank-0.log", file=sys.stderr)
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
    done = subprocess.run(
        ["sinfo", "--noheader", "--format=%R"],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    return sorted(set(done.stdout.split()))
