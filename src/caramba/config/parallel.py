"""Schema of how a run is spread over ranks, what starts its workers, and what a SLURM job asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, field_validator, model_validator

from caramba.config.base import Config
from caramba.config.layer_base import Positive
from caramba.config.source import is_sequence
from caramba.config.train import Checkpointing
from caramba.errors import quote

StrategyName = Literal["single", "ddp", "fsdp2", "fsdp2_tp", "pipeline"]
SHARDED = ("fsdp2", "fsdp2_tp")
FORMER_BUCKET = 25
"""What manifests of before have as `bucket_cap_mb` under every strategy."""


def _one_dimension(value: Any) -> Any:
    """Refuse what names a split of layers in several dimensions, as `2d`, `2.5D`, `2x2` or a list of sizes."""
    if is_sequence(value) or (isinstance(value, str) and re.fullmatch(r"[23](\.5)?-?[dD]|\d+(x\d+)+", value)):
        raise ValueError(
            "layers are split in one dimension, by heads and width: 2-D, 2.5-D and 3-D splits exchange blocks of "
            "weights too, which pays on more ranks than share a layer here; use a number of ranks"
        )
    return value


# Keys, the values that any strategy may have, the strategies that take others, and how a message names them.
_BELONGS: tuple[tuple[str, tuple[Any, ...], tuple[str, ...], str], ...] = (
    ("sequence_parallel", (False,), ("fsdp2_tp",), "fsdp2_tp"),
    ("sharding", (None,), SHARDED, "fsdp2"),
    ("mixed_precision", ("auto",), SHARDED, "fsdp2"),
    ("wrap", (None,), SHARDED, "fsdp2"),
    ("find_unused_parameters", (False,), ("ddp",), "ddp"),
    ("bucket_cap_mb", ("auto", FORMER_BUCKET), ("ddp",), "ddp"),
    ("reduce_dtype", ("float32",), ("ddp", *SHARDED), "ddp and fsdp2"),
    ("blockwise", ("data",), ("ddp", "fsdp2"), "ddp"),
)


class ParallelConfig(Config):
    """How a run is spread over devices: dp * tp * pp ranks, each a process that reads the same manifest.

    A rank reads `batch_size` sequences of its own, so that a step sees batch_size * gradient_accumulation_steps * dp of
    them. A run that resumes with another number of ranks keeps that product, by accumulating more or less.
    """

    strategy: StrategyName = Field(
        default="single",
        description="single, ddp, fsdp2 (sharded), fsdp2_tp (tensor parallel too) or pipeline",
    )
    dp: Positive | Literal["auto"] = Field(
        default="auto",
        description="ranks that share the data; auto: as many as the launcher starts, here one per GPU",
    )
    tp: Annotated[Positive, BeforeValidator(_one_dimension)] = Field(
        default=1, description="of fsdp2_tp: ranks that share the work of every layer"
    )
    sequence_parallel: bool = Field(
        default=False,
        description="of fsdp2_tp: norms, and activations kept between layers, are of a rank's own tokens; tp has to "
        "divide block_size",
    )
    pp: Positive = Field(
        default=1, description="of pipeline: ranks that each hold as many blocks of a uniform stack, in turn"
    )
    num_micro_batches: Positive | None = Field(
        default=None,
        description="of pipeline: parts of a batch that follow each other through the ranks (1F1B); else pp",
    )
    sharding: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"] | None = Field(
        default=None,
        description="of fsdp2: HYBRID_SHARD within a node and replicas between nodes, as where there are several; "
        "SHARD_GRAD_OP keeps gathered weights until backward",
    )
    mixed_precision: Literal["auto", "none", "bfloat16"] = Field(
        default="auto",
        description="what fsdp2 gathers blocks in: auto is bfloat16 where a phase computes in it; sums are float32",
    )
    activation_checkpointing: Checkpointing | None = Field(
        default=None,
        description="of every phase that does not say otherwise: train.activation_checkpointing under every strategy",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="what ddp and fsdp2 sum gradients of all ranks in during backward; bfloat16 is half the "
        "traffic, and rounds them. Under fsdp2 it is of blocks: embedding, head and last norm are summed in float32. "
        "Phases of blocks, and weights in bfloat16 under ddp, keep their own dtype",
    )
    wrap: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        default=None,
        description="types of nodes that fsdp2 gathers as one; by default the blocks of the topology",
    )
    find_unused_parameters: bool = Field(
        default=False,
        description="of ddp: for models some of whose weights take no part in a step; a step without a gradient for "
        "each weight ends the run otherwise",
    )
    bucket_cap_mb: Positive | Literal["auto"] = Field(
        default="auto",
        description="of ddp: MiB of gradients that are averaged in place at once, during backward; auto: "
        "a twelfth of them, 25 at least",
    )
    blockwise: Literal["data", "blocks"] = Field(
        default="data",
        description="what ranks share in block phases: the data of all blocks, or, of blockwise alone, the blocks",
    )

    @model_validator(mode="after")
    def _rules(self) -> ParallelConfig:
        for problem in self._problems():
            raise ValueError(problem)
        return self

    def _problems(self) -> list[str]:
        found: list[str] = list(self._pipeline_problems())
        if self.strategy == "single" and (self.dp not in ("auto", 1) or self.tp > 1):
            found.append(f"parallel=single is one process, got dp={self.dp}, tp={self.tp}; use parallel=ddp or fsdp2")
        if self.strategy in ("ddp", "fsdp2", "pipeline") and self.tp > 1:
            found.append(f"parallel={self.strategy} has no tp, got tp={self.tp}; use parallel=fsdp2_tp")
        if self.strategy == "fsdp2_tp" and self.tp == 1:
            found.append("parallel=fsdp2_tp needs parallel.tp of 2 or more, got 1; set it, or use fsdp2")
        if self.tp > 1 and self.sharding == "HYBRID_SHARD":
            found.append("sharding=HYBRID_SHARD with tp would be a mesh of three dimensions; leave sharding out")
        if self.sharding == "NO_SHARD":
            found.append("sharding=NO_SHARD keeps whole weights on every rank, which is parallel=ddp; use that")
        for name, defaults, owners, shown in _BELONGS:
            value = getattr(self, name)
            if value not in defaults and self.strategy not in owners:
                key = f"{name}={value}" if name in ("reduce_dtype", "blockwise") else name
                found.append(f"{key} belongs to parallel={shown}, got parallel={self.strategy}; remove it")
        return found

    def _pipeline_problems(self) -> Iterator[str]:
        """Yield what contradicts a pipeline, which is of one dimension: pp ranks and no others."""
        if self.strategy != "pipeline":
            for name, default in (("pp", 1), ("num_micro_batches", None)):
                if getattr(self, name) != default:
                    yield (
                        f"{name}={getattr(self, name)} belongs to parallel=pipeline, got parallel={self.strategy}, "
                        "which has no stages; use parallel=pipeline, or remove it"
                    )
            return
        if self.pp == 1:
            yield "parallel=pipeline needs parallel.pp of 2 or more, got 1; set it, or use parallel=single"
        if self.dp not in ("auto", 1):
            yield (
                f"parallel=pipeline is one pipeline, without replicas, got dp={self.dp}; leave dp out, or use "
                "parallel=fsdp2"
            )
        if self.micro_batches < self.pp:
            yield (
                f"num_micro_batches={self.num_micro_batches} leaves some of the pp={self.pp} stages without work at "
                f"any time, which 1F1B cannot order; use {self.pp} or more"
            )

    @property
    def micro_batches(self) -> int:
        """Parts of a batch that follow each other through a pipeline."""
        return self.num_micro_batches or self.pp

    @property
    def sizes(self) -> str:
        """The sizes that make the number of ranks, as a user writes them."""
        return f"pp={self.pp}" if self.strategy == "pipeline" else f"dp={self.dp} x tp={self.tp}"

    def bytes_at_once(self, gradients_bytes: int) -> int:
        """Return how many bytes of gradients ddp averages at once.

        A collective holds multiprocessors while it waits for the slowest rank, so that many small ones slow
        concurrent products; the last one, after backward, is hidden by nothing, so that none is large.
        """
        if self.bucket_cap_mb == "auto":
            return max(25 * 2**20, gradients_bytes // 12)
        return self.bucket_cap_mb * 2**20

    @property
    def ranks_per_batch(self) -> int:
        """Ranks that work on the same batch."""
        return self.tp * self.pp

    @property
    def is_sharded(self) -> bool:
        """Whether weights, gradients and the optimiser's state are spread over ranks."""
        return self.strategy in SHARDED

    @property
    def ranks(self) -> int | None:
        """Processes of the run, None where the launcher decides."""
        if self.strategy == "pipeline":
            return self.pp
        return None if self.dp == "auto" else self.dp * self.tp


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
        default=None,
        description="CPU threads of a worker; else its share of the cores, or fewer by OMP_NUM_THREADS",
    )
    on_failure: Literal["continue", "stop"] = Field(
        default="continue", description="whether a failed point of a sweep keeps others from starting"
    )
    nodes: Positive | None = Field(default=None, description="slurm: machines of a job; else 1")
    nproc_per_node: Positive | None = Field(
        default=None, description="torchrun, slurm: ranks on each node; else what parallel asks for"
    )
    max_restarts: NonNegativeInt | None = Field(
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

    partition: Word | None = Field(default=None, description="SLURM partition; unset: the default of the site")
    account: Word | None = Field(default=None, description="SLURM account; unset: the default of the user")
    qos: Word | None = Field(default=None, description="SLURM quality of service; unset: the default of the site")
    time: Time | None = Field(default=None, description="limit of a job, as SLURM writes it: HH:MM:SS or D-HH:MM:SS")
    gpus: NonNegativeInt | Word | None = Field(
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
                raise ValueError(f"{quote(name)} is not the name of a variable; letters, digits and _, such as HF_HOME")
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
