"""A phase on several ranks: rank 0 runs the experiment, and sends the others the phase to train with it."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError

from caramba import kernels
from caramba.config.manifest import Manifest, RunConfig
from caramba.config.model import ModelSpec
from caramba.config.parallel_check import pipeline_problem
from caramba.config.train import PhaseConfig
from caramba.console import logger
from caramba.data.checkpoint.network import spec_of
from caramba.data.corpus import open_text
from caramba.distill import BlockwiseObjective, Objective, PipelinedObjective
from caramba.errors import CarambaError, ConfigError, OutOfMemory
from caramba.experiment.objectives import build_objective
from caramba.experiment.resolve_plans import reduce_for_all_ranks
from caramba.experiment.session import Session, StageLedger
from caramba.layer import attention_backends
from caramba.model import Model, build_empty, build_model
from caramba.model.custom_layers import refuse_lost_tensors
from caramba.model.parallel import (
    apply_tensor_parallel,
    gather_stages,
    send_stages,
    split_stage,
    tensor_parallel_plan,
)
from caramba.model.sharding import fill_sharded, gather_state, shard_model, sharding_of
from caramba.runtime import (
    AttentionChoice,
    Ranks,
    RuntimePlan,
    data_share,
    get_rank,
    is_main_process,
    seed_process,
    send_from_main,
)
from caramba.train import SHARDED, STAGED, BlockwiseDistillation, PhaseData, fit, strategy_for


@dataclass(frozen=True)
class PhaseCommand:
    """One phase as rank 0 resolved it. Weights are sent separately."""

    group: str
    phase: PhaseConfig
    plan: RuntimePlan
    seed: int
    data_seed: int
    data_start: int
    model: ModelSpec
    teacher: ModelSpec | None
    attention: AttentionChoice
    flops_per_token: float | None
    run: str
    signature: str
    """Under which the run's plan is kept, should memory run out on the rank that reads this."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    def to_json(self) -> str:
        """Return the order as a JSON text."""
        return _adapter().dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> PhaseCommand:
        """Read an order that `to_json` wrote.

        Raises:
            CarambaError: the text is not an order of this version.
        """
        try:
            return _adapter().validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(map(str, first["loc"])) or "the text"
            raise CarambaError(
                f"ranks: an order from rank 0 is not valid at {where}: {first['msg'][:200]}; start all ranks with one "
                "version of caramba"
            ) from None


@functools.cache
def _adapter() -> TypeAdapter[PhaseCommand]:
    return TypeAdapter(PhaseCommand)


@dataclass(frozen=True)
class Assembled:
    """What a phase trains on this rank: its objective, and how the model's weights are spread and come back."""

    objective: Objective
    shard: Callable[[], None] | None
    gather: Callable[[], None]


def assemble(
    session: Session, phase: PhaseConfig, decided: RuntimePlan, model: Model | None, spec: ModelSpec
) -> Assembled:
    """Build the objective of a phase over `model`, or over a shell if weights are sharded; every rank calls this.

    Ranks without a `model` get rank 0's weights. With sharded weights `gather` puts the trained ones into `model`,
    which waits on the host meanwhile.
    """
    device = session.device
    if session.teacher is not None:
        send_from_main([*session.teacher.parameters(), *session.teacher.buffers()])
    way = strategy_for(session.manifest.parallel, phase)
    if way == STAGED:
        return _staged(session, phase, model, spec)
    if way != SHARDED:
        whole = model if model is not None else build_empty(spec, device)
        objective = build_objective(session, phase, decided, whole)
        send_from_main([*whole.parameters(), *whole.buffers()])
        return Assembled(objective, None, lambda: None)
    shell = build_model(spec, device="meta")
    objective = build_objective(session, phase, decided, shell)
    objective.is_sharded = True
    if model is not None:
        model.to("cpu")

    def shard() -> None:
        sharding = sharding_of(session.manifest.parallel, device, decided.value("dtype"))
        if sharding.within is not None:
            split_sequence = session.manifest.parallel.sequence_parallel
            apply_tensor_parallel(shell, sharding.within, split_sequence=split_sequence)
        shard_model(shell, sharding)
        fill_sharded(shell, model, device)

    def gather() -> None:
        state = gather_state(shell)
        if model is not None:
            model.load_state_dict(state)

    return Assembled(objective, shard, gather)


def _staged(session: Session, phase: PhaseConfig, model: Model | None, spec: ModelSpec) -> Assembled:
    """Give every rank its stage of a model, which waits on the host of rank 0 meanwhile."""
    parallel = session.manifest.parallel
    shell = build_model(spec, device="meta")
    refuse_lost_tensors(shell)
    stage = split_stage(shell, get_rank(), parallel.pp)
    if model is not None:  # before the stage takes its memory
        model.to("cpu")
    send_stages(model, stage, session.device)
    objective = PipelinedObjective(
        stage,
        micro_batches=parallel.micro_batches,
        accumulation=phase.gradient_accumulation_steps,
        chunk=phase.vocab_chunk,
        dense=phase.cross_entropy == "dense",
    )
    return Assembled(objective, None, lambda: gather_stages(stage, model))


def check_split(session: Session) -> None:
    """Refuse layers that the ranks of parallel.tp cannot share, before anything is trained, and stacks that those of
    parallel.pp cannot.

    Raises:
        ConfigError: naming the heads or features, dropout under sequence_parallel, a layer that has no plan, or what
            is no uniform stack.
    """
    _check_stages(session)
    parallel = session.manifest.parallel
    if parallel.tp == 1:
        return
    specs = [model.spec for model in (session.teacher, session.student) if model is not None]
    for spec in (session.manifest.model, *specs):
        shell = build_model(spec, device="meta")
        tensor_parallel_plan(shell, parallel.tp, split_sequence=parallel.sequence_parallel)


def _check_stages(session: Session) -> None:
    """Refuse models read from files that a run would have to cut; those of the manifest have been looked at."""
    parallel = session.manifest.parallel
    if parallel.strategy != "pipeline":
        return
    trained = {phase.trains for _, phase in session.group.trained}
    for role, model in (("teacher", session.teacher), ("student", session.student)):
        problem = pipeline_problem(model.spec, parallel.pp) if model is not None and role in trained else None
        if problem is not None:
            raise ConfigError(f"{role}: {problem}")


def send_command(
    session: Session,
    ranks: Ranks,
    run: RunConfig,
    phase: PhaseConfig,
    decided: RuntimePlan,
    seed: int,
    model: Model,
    flops_per_token: float | None,
) -> None:
    """Tell the other ranks to train a phase with this one."""
    needs_teacher = phase.reads_teacher and session.teacher is not None
    ranks.order(
        PhaseCommand(
            session.group.name,
            phase,
            decided,
            seed,
            session.stream_seed(run),
            session.stream_start(run),
            spec_of(model.spec),
            spec_of(session.model_of("teacher").spec) if needs_teacher else None,
            session.attention,
            flops_per_token,
            run.id,
            session.plan_signatures.get(run.id, decided.signature),
        ).to_json()
    )


def follow(manifest: Manifest, run_dir: Path, ranks: Ranks) -> None:
    """Train the phases that rank 0 sends until the run ends. Nothing is measured or written here."""
    logger.quiet = True
    sessions: dict[str, Session] = {}
    while (text := ranks.next_order()) is not None:
        order = PhaseCommand.from_json(text)
        if order.group not in sessions:
            sessions[order.group] = _session(manifest, order.group, run_dir)
        _train(sessions[order.group], order)


def _session(manifest: Manifest, name: str, run_dir: Path) -> Session:
    group = next(item for item in manifest.groups if item.name == name)
    several = len(manifest.groups_to_run()) > 1
    folder = run_dir / "groups" / name if several else run_dir
    return Session(
        manifest, group, folder, torch.device("cpu"), open_text(manifest, group), StageLedger(folder)
    )  # rank 0 has made what this reads


def _train(session: Session, order: PhaseCommand) -> None:
    gc.collect()
    assert not is_main_process()
    session.device = torch.device(order.plan.value("device"))
    kernels.load(session.device, session.manifest.kernels)
    seed_process(order.seed, data_share(session.manifest.parallel.tp)[0])  # ranks of one layer draw alike
    session.teacher = None if order.teacher is None else build_empty(order.teacher, session.device)
    with attention_backends(session.device, order.attention):
        made = assemble(session, order.phase, order.plan, None, order.model)
        objective = made.objective
        schedule = objective.schedule if isinstance(objective, BlockwiseObjective) else None
        try:
            windows, val = (
                session.training_windows(order.phase),
                session.windows("val", order.phase.block_size),
            )
            fit(
                objective,
                order.phase,
                PhaseData(windows, val, order.data_seed, order.data_start),
                order.plan,
                manifest=session.manifest,
                run_dir=session.run_dir,
                save_final=made.gather,
                flops_per_token=order.flops_per_token,
                shard=made.shard,
                callbacks=[] if schedule is None else [BlockwiseDistillation(schedule)],
            )
        except OutOfMemory as error:
            session.plan_signatures[order.run] = order.signature
            raise reduce_for_all_ranks(session, order.run, order.phase, order.plan, error) from None
    session.teacher = None
