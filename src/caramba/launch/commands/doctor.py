"""`caramba doctor`: what this machine has, and whether it is enough."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caramba.launch.overrides import refuse_arguments
from caramba.runs.environment import package_version
from caramba.runs.files import home
from caramba.runs.ranks import AGENT_STORE, FROM_SLURM, is_rank

REQUIRED = (
    *("torch", "lightning", "hydra-core", "omegaconf", "pydantic", "torchmetrics", "tensorboard"),
    *("numpy", "safetensors", "tokenizers", "matplotlib", "rich"),
)
OPTIONAL = (
    *("triton", "torchao", "wandb", "h5py", "plotext", "optuna"),
    *("starlette", "uvicorn", "prometheus_client", "litellm", "lm_eval"),
)
TORCH_PROBE = "import json; from caramba.kernels.probe import probe; print(json.dumps(probe()))"


@dataclass(frozen=True)
class Diagnosis:
    """One line of the report; `is_ok` is None for a fact that nothing depends on."""

    name: str
    text: str
    is_ok: bool | None = None


def main(argv: list[str]) -> int:
    """Print every finding; 1 when something is missing or wrong."""
    refuse_arguments("doctor", argv)
    failed = False
    for finding in findings():
        mark = {True: "ok  ", False: "FAIL", None: "    "}[finding.is_ok]
        print(f"{mark} {finding.name:<22} {finding.text}")
        failed = failed or finding.is_ok is False
    print("something is missing or wrong" if failed else "ready")
    return 1 if failed else 0


def findings() -> Iterator[Diagnosis]:
    """Yield what there is to say about this machine."""
    version = sys.version_info
    yield Diagnosis("python", f"{platform.python_version()} (3.11 to 3.13)", (3, 11) <= version[:2] < (3, 14))
    yield Diagnosis("platform", platform.platform())
    for name in REQUIRED:
        found = package_version(name)
        yield Diagnosis(name, found or f"missing; pip install {name}", found is not None)
    for name in OPTIONAL:
        yield Diagnosis(name, package_version(name) or "not installed (optional)")
    yield from _torch()
    yield Diagnosis(
        "cpu cores", f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}"
    )
    memory = memory_gb()
    if memory is not None:
        yield Diagnosis("memory", f"{memory:.1f} GB")
    for name, folder in (("runs", Path("runs").absolute()), ("cache", home())):
        yield _folder(name, folder)
    yield Diagnosis("git", shutil.which("git") or "not found; runs will not record a commit")
    yield Diagnosis("pdflatex", shutil.which("pdflatex") or "not found; tables.tex is written, papers are not compiled")
    yield Diagnosis("sbatch", shutil.which("sbatch") or "not found; no SLURM here")
    yield from slurm_task(os.environ)


def _torch() -> Iterator[Diagnosis]:
    """Ask torch in a process of its own: a broken driver cannot take this report down."""
    done = subprocess.run([sys.executable, "-c", TORCH_PROBE], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield Diagnosis("torch import", last, False)
        return
    facts = json.loads(done.stdout.strip().splitlines()[-1])
    cuda = ", ".join(facts["cuda"]) or "none"
    yield Diagnosis("torch import", f"{facts['version']}, {facts['threads']} threads", True)
    yield Diagnosis("cuda", f"{cuda} (built for {facts['cuda_version']})" if facts["cuda_version"] else cuda)
    yield from _metal(facts["metal"], facts["mps"])
    device = facts["device"]
    if facts["driver"]:
        yield Diagnosis("driver", facts["driver"])
    if cuda != "none" and facts["ops"].get("dba_decode") == "triton":
        missing = "not found; quantised caches and INT4 weights run Triton's kernels (pip install nvidia-cuda-nvrtc)"
        yield Diagnosis("nvrtc", facts["nvrtc"] or missing)
    ops = ", ".join(f"{op} {backend}" for op, backend in facts["ops"].items())
    yield Diagnosis("kernels", f"on {device}: {ops}")
    yield Diagnosis("op call on the host", f"{facts['call_us']:.1f} us (dequantize of one block)")
    if facts["roofs"]:
        roofs = ", ".join(f"{name} {rate:.0f} GB/s" for name, rate in facts["roofs"].items())
        yield Diagnosis("memory roofs", f"{roofs}, measured on {facts['roof_bytes'] / 1e9:.1f} GB")


def _metal(metal: Mapping[str, Any], is_there: bool) -> Iterator[Diagnosis]:
    """Report Apple's GPU, its memory, and which ops have kernels for it, or why none runs."""
    if is_there:
        bf16 = "bfloat16" if metal["bfloat16"] else "no exact bfloat16: trains in float32, generates in float16"
        room = f"{metal['allocated_bytes'] / 1e9:.1f} of {metal['recommended_bytes'] / 1e9:.1f} GB allocated"
        yield Diagnosis("mps", f"{metal['chip']}, macOS {metal['macos']}, {room}, {bf16}")
    else:
        yield Diagnosis("mps", "none")
    fallback = metal["fallback"] or "unset; operators that MPS lacks are errors"
    yield Diagnosis("mps fallback", f"PYTORCH_ENABLE_MPS_FALLBACK {fallback}")
    ops = ", ".join(op for op, backend in metal["kernels"].items() if backend == "metal")
    where = "" if is_there else "; none runs here, there is no MPS device"
    yield Diagnosis("metal kernels", f"{ops}; other ops run the reference{where} (not run on Apple hardware yet)")


def slurm_task(variables: Mapping[str, str]) -> Iterator[Diagnosis]:
    """Report the SLURM task of this process, and whether its job gives each run the tasks that it needs.

    Only srun counts the tasks of a step; in a batch script or a shell of salloc one process is one run.
    """
    job = variables.get("SLURM_JOB_ID")
    if job is None:
        return
    tasks, nodes = (int(variables.get(f"SLURM_STEP_NUM_{what}", "1")) for what in ("TASKS", "NODES"))
    per_node, gpus = variables.get("SLURM_NTASKS_PER_NODE"), variables.get("CUDA_VISIBLE_DEVICES")
    here, what = (
        tasks // nodes,
        f"job {job}, task {variables.get('SLURM_PROCID', '0')} of {tasks} on {nodes} nodes",
    )
    problem = None
    if AGENT_STORE in variables and tasks > nodes:
        problem = "each starts a torchrun; give torchrun one task per node (srun --ntasks-per-node=1)"
    elif variables.get(FROM_SLURM) == "slurm" and tasks > 1:
        if per_node is None or int(per_node) * nodes != tasks:
            problem = (
                f"--ntasks-per-node={per_node or 'unset'} does not make them; ask for --ntasks-per-node={here} in "
                "place of --ntasks"
            )
        elif gpus and len(gpus.split(",")) < here:
            problem = f"each sees the GPUs {gpus} alone; ask for --gpus-per-node in place of --gpus-per-task"
    elif tasks > 1 and not is_rank(variables):
        problem = (
            "each would run a command by itself; srun --ntasks=1, or let launcher=slurm write the step, whose tasks "
            "are ranks"
        )
    yield Diagnosis("slurm task", what if problem is None else f"{what}: {problem}", problem is None)


def memory_gb() -> float | None:
    """Return the machine's memory in GB (10^9 bytes), or None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    except (ValueError, OSError, AttributeError):
        return None


def _folder(name: str, folder: Path) -> Diagnosis:
    """Whether a folder, or the nearest parent that exists, can be written."""
    present = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(present).free / 1e9
    try:
        with tempfile.TemporaryFile(dir=present):
            pass
    except OSError as error:
        return Diagnosis(name, f"{folder}: cannot be written ({error.strerror})", False)
    return Diagnosis(name, f"{folder}: writable, {free:.1f} GB free", True)
