"""What starts the worker on a frozen manifest, and what a site's SLURM wants to be asked for."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from caramba.config.base import Config
from caramba.config.layer import Positive
from caramba.errors import quote

# Each of these ends in a line of a shell script: one word without blanks, quotes or anything that a shell reads.
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.,:/=@%+&|*\[\]-]*$")]
# A module is an operand of a command there: its version may follow a slash, @ or +, and nothing in it is an operator.
Module = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.,:/=@+-]*$")]
Time = Annotated[str, Field(pattern=r"^(\d+-\d{1,2}(:\d{1,2}){0,2}|\d+(:\d{1,2}){1,2})$")]
Memory = Annotated[str, Field(pattern=r"^\d+[KMGT]?$")]
Option = Annotated[str, Field(pattern=r"^--[a-z][a-z0-9-]*(=[A-Za-z0-9_.,:/@%+&|*\[\]-]+)?$")]

SLURM = ("slurm", "slurm_sbatch_only")
# Which launchers a key belongs to; elsewhere it would be ignored.
_USED_BY = {
    "n_jobs": ("process", *SLURM),
    "devices": ("process", "torchrun"),
    "threads": ("process", "torchrun", *SLURM),
    "nodes": SLURM,
    "nproc_per_node": ("torchrun", *SLURM),
    "max_restarts": ("torchrun",),
    "requeue": SLURM,
    "signal_s": SLURM,
}
# What the script sets itself, by the key that sets it.
_SET_BY_US = {
    "job-name": "name",
    "chdir": "the folder that you launch from",
    "output": "caramba: logs are in the run directory",
    "error": "caramba: logs are in the run directory",
    "open-mode": "caramba",
    "array": "launcher.n_jobs and the points of -m",
    "nodes": "launcher.nodes",
    "ntasks": "launcher.nproc_per_node",
    "ntasks-per-node": "launcher.nproc_per_node",
    "requeue": "launcher.requeue",
    "no-requeue": "launcher.requeue",
    "signal": "launcher.signal_s",
    "partition": "cluster.partition",
    "account": "cluster.account",
    "qos": "cluster.qos",
    "time": "cluster.time",
    "gpus-per-node": "cluster.gpus",
    "gres": "cluster.gpus",
    "cpus-per-task": "cluster.cpus_per_task",
    "mem": "cluster.mem",
    "constraint": "cluster.constraint",
}


class LauncherConfig(Config):
    """What starts the worker: `inline` in this process, `process` in processes of its own, `torchrun` as ranks of this
    node, `slurm` as a detached job, `slurm_sbatch_only` writes that job's script and stops."""

    type: Literal["inline", "process", "torchrun", "slurm", "slurm_sbatch_only"] = Field(
        default="inline",
        description="how workers start: inline, process, torchrun, slurm or slurm_sbatch_only",
    )
    n_jobs: Positive | None = Field(
        default=None,
        description="points of a sweep at a time; process: else one per GPU, or per core; slurm: else all",
    )
    devices: Annotated[tuple[int | str, ...], Field(min_length=1)] | None = Field(
        default=None,
        description="process, torchrun: GPUs as CUDA_VISIBLE_DEVICES names them, one per worker in turn",
    )
    threads: Positive | None = Field(
        default=None, description="CPU threads of a worker; else the cores divided among the workers"
    )
    on_failure: Literal["continue", "stop"] = Field(
        default="continue", description="whether a failed point of a sweep keeps others from starting"
    )
    nodes: Positive | None = Field(default=None, description="slurm: machines of a job; else 1")
    nproc_per_node: Positive | None = Field(
        default=None, description="torchrun, slurm: ranks on each node; else what parallel asks for"
    )
    max_restarts: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="torchrun: how often all ranks start again, from the last saved state, when one dies",
    )
    requeue: bool | None = Field(
        default=None, description="slurm: whether a job that ran out of time is queued again; else true"
    )
    signal_s: Annotated[int, Field(ge=10, le=65535)] | None = Field(
        default=None, description="slurm: seconds before the time limit at which the state is saved; else 180"
    )

    @model_validator(mode="after")
    def _used(self) -> LauncherConfig:
        for name, types in _USED_BY.items():
            if self.type not in types and getattr(self, name) is not None:
                raise ValueError(
                    f"{name}={getattr(self, name)} has no meaning for launcher={self.type}, which {_DOES[self.type]}; "
                    f"add launcher={types[0]}, or leave it out"
                )
        if self.is_slurm and self.on_failure != "continue":
            raise ValueError(
                f"on_failure={self.on_failure} has no meaning for launcher={self.type}, whose points are all queued at "
                "once; leave it out"
            )
        return self

    @property
    def is_slurm(self) -> bool:
        return self.type in SLURM


_DOES = {
    "inline": "starts no processes here",
    "process": "starts one process per run",
    "torchrun": "starts the ranks of one run on this machine",
    "slurm": "hands runs to SLURM",
    "slurm_sbatch_only": "writes a script for SLURM",
}


class ClusterConfig(Config):
    """What a SLURM site wants to be asked for; a file of your own under `--config-dir DIR` in DIR/cluster/."""

    partition: Word | None = Field(
        default=None, description="SLURM partition; unset: the default of the site"
    )
    account: Word | None = Field(default=None, description="SLURM account; unset: the default of the user")
    qos: Word | None = Field(
        default=None, description="SLURM quality of service; unset: the default of the site"
    )
    time: Time | None = Field(
        default=None, description="limit of a job, as SLURM writes it: HH:MM:SS or D-HH:MM:SS"
    )
    gpus: Annotated[int, Field(ge=0)] | Word | None = Field(
        default=None,
        description="GPUs per node, a number or TYPE:NUMBER; else one per rank unless device=cpu; 0 asks for none",
    )
    cpus_per_task: Positive | None = Field(default=None, description="cores of a rank")
    mem: Memory | None = Field(default=None, description="memory of a node, such as 64G")
    constraint: Word | None = Field(default=None, description="SLURM node features; unset: none")
    modules: tuple[Module, ...] = Field(default=(), description="loaded before the worker starts")
    env: dict[str, str] = Field(default_factory=dict[str, str], description="variables that the worker gets")
    options: tuple[Option, ...] = Field(
        default=(), description="further #SBATCH lines, such as --exclusive or --reservation=NAME"
    )

    @field_validator("time", mode="before")
    @classmethod
    def _clock(cls, time: object) -> object:
        if isinstance(time, int):  # YAML reads 4:00:00 as 14400, which SLURM would take for minutes
            raise ValueError(f"got the number {time}; write it as HH:MM:SS, in a file in quotes: '04:00:00'")
        return time

    @field_validator("env")
    @classmethod
    def _names(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(
                    f"{quote(name)} is not the name of a variable; letters, digits and _, such as HF_HOME"
                )
            if "\n" in value or "\0" in value:
                raise ValueError(f"{name} holds a line break, which a script's line cannot; remove it")
        return env

    @field_validator("options")
    @classmethod
    def _ours(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        for option in options:
            name = option.removeprefix("--").partition("=")[0]
            if name in _SET_BY_US:
                raise ValueError(f"{option}: --{name} is set by {_SET_BY_US[name]}; remove it here")
        return options
