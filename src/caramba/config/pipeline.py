"""What a pipeline of stages can hold and train: refused by name before anything is built."""

from __future__ import annotations

from collections.abc import Iterator

from caramba.config.model import ModelSpec
from caramba.config.parallel import ParallelConfig
from caramba.config.sharding_limits import float16_conflict, whole_model_keys
from caramba.config.topology import NestedTopologyConfig, StackedTopologyConfig
from caramba.config.train import PhaseConfig

ELSE = "use parallel=fsdp2"


def stack_of(spec: ModelSpec) -> tuple[int, NestedTopologyConfig] | None:
    """Return the index of the root's one repeated list, and that list; None if there is not one."""
    if not isinstance(spec.topology, StackedTopologyConfig):
        return None
    found = [
        (index, layer)
        for index, layer in enumerate(spec.topology.layers)
        if isinstance(layer, NestedTopologyConfig)
    ]
    return found[0] if len(found) == 1 else None


def pipeline_problem(spec: ModelSpec, n_stages: int) -> str | None:
    """Return why a model cannot be cut into `n_stages` stages of as many equal blocks, None where it can."""
    found = stack_of(spec)
    if found is None:
        return (
            "parallel=pipeline cuts a uniform stack, one NestedTopology in the StackedTopology that is the model's "
            f"root, and this topology has no such list or several; {ELSE}"
        )
    repeat = found[1].repeat
    if repeat % n_stages:
        return (
            f"parallel=pipeline gives every stage as many blocks, and pp={n_stages} does not divide the {repeat} of "
            f"the stack; use a pp that does, or {ELSE}"
        )
    return None


def pipeline_conflicts(phase: PhaseConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Yield what a phase asks for that stages do not have."""
    name = "parallel=pipeline"
    if phase.reads_teacher:
        what = f"phase={phase.phase}" + (
            f" with objective={phase.objective}" if phase.objective != "ce" else ""
        )
        yield f"{what} reads a teacher, which {name} does not cut into stages; {ELSE} or ddp"
        return
    if measured := phase.measured_keys:
        verb, values = ("is", "it a value") if len(measured) == 1 else ("are", "them values")
        yield (
            f"{', '.join(measured)} {verb} chosen by measuring one process, and {name} has a part of the model on "
            f"every rank; give {values}"
        )
    elif isinstance(phase.batch_size, int) and phase.batch_size % parallel.micro_batches:
        yield (
            f"{name} cuts a batch into num_micro_batches={parallel.micro_batches} equal parts, got batch_size="
            f"{phase.batch_size}; use a multiple of {parallel.micro_batches}"
        )
    if phase.has_16_bit_weights:
        yield f"use_amp=false with dtype=bfloat16 keeps weights in 16 bits, which {name} does not; remove use_amp"
    yield from float16_conflict(phase, name)
    for key in whole_model_keys(phase, compile_model=False):
        yield f"{key} is not made for the stages of {name}; remove it, or use parallel=ddp"
    if phase.gradient_clip_algorithm == "adagc":
        yield f"gradient_clip_algorithm=adagc is not made for the stages of {name}; use norm or value"
