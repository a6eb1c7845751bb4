"""Each phase of training with what is measured at its end."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from caramba import evaluation
from caramba.config.benchmark import STAGED
from caramba.config.estimate import model_cost, variant
from caramba.config.estimate.model import training_flops
from caramba.config.estimate.variants import feed_forward_widths
from caramba.config.kvcache import KVCacheKind
from caramba.config.manifest import RunConfig
from caramba.config.model import ModelSpec
from caramba.config.surgery import keeps_copied
from caramba.config.train import BLOCK_PHASES, PhaseConfig
from caramba.console import logger
from caramba.data import spread_windows
from caramba.data.checkpoint.network import spec_of
from caramba.distill import BlockSchedule, BlockwiseObjective
from caramba.errors import OutOfMemory, VerificationFailed
from caramba.experiment.objectives import build_objective, count_missing_logits
from caramba.experiment.planning import disable_logging
from caramba.experiment.ranks import Assembled, assemble, send_command
from caramba.experiment.resolve_plans import reduce_batch, reduce_for_all_ranks
from caramba.experiment.session import ORIGIN, PROXY, Session, StageRecord, is_fresh_init
from caramba.experiment.surgery import TRANSPLANT, transplant_student
from caramba.model import Model, build_model, check_causal
from caramba.model.topology.base import custom_layers_of
from caramba.optim import check_lr_mult
from caramba.result import BenchmarkResult, PhaseResult, Verdict
from caramba.runs.events import PHASE_FINISHED, append_event
from caramba.runs.exit_codes import until_recorded
from caramba.runs.shell import show_path
from caramba.runtime import (
    RuntimePlan,
    get_rank,
    get_world_size,
    is_main_process,
    release_memory,
    seed_process,
)
from caramba.train import (
    BenchmarkArtifacts,
    BlockwiseDistillation,
    FitOutcome,
    PhaseData,
    Verification,
    drop_state,
    fit,
    has_saved_state,
    state_path,
)

WAIT_WARNING = 0.05  # share of a phase spent waiting for batches


def train_run(session: Session, run: RunConfig, *, is_last: bool) -> None:
    """Train one run of the group, unless it is finished; what it measured is in the ledger afterwards.

    Raises:
        VerificationFailed: a check with fail_fast crossed its threshold, after everything was recorded.
    """
    phase = run.train
    assert phase is not None
    assert phase.trains is not None
    if phase.trains == "student" and session.student is None:
        if phase.phase == "pretrain":  # from scratch: no teacher is involved
            session.student = build_model(session.manifest.model, seed=session.seed_of("student")).to(session.device)
        else:
            transplant_student(session)
    if run.id in session.ledger:
        drop_state(session.run_dir, run.id)  # a kill may have come before it went
        session.retry_failed_benchmarks(run.id)
        hold(session.ledger[run.id].verdicts)
        if not session.ledger[run.id].phase.skipped and not phase.control:
            session.reload(run.id, phase.trains)
        return
    if (
        phase.trains == "teacher"
        and session.manifest.model.teacher
        and session.manifest.model.teacher.checkpoint
        and not phase.control
    ):
        _skip(session, run, phase, "model.teacher.checkpoint is given")
        return
    with until_recorded():
        record = fit_phase(session, run, phase, verifies=bool(run.verify) and not is_last)
        session.ledger.add(record)
        drop_state(session.run_dir, run.id)  # of no more use once the phase is on record
    hold(record.verdicts)


def hold(verdicts: tuple[Verdict, ...]) -> None:
    """Report verdicts; raise when one with fail_fast did not pass."""
    for verdict in verdicts:
        for item in verdict.checks:
            text = f"verify {verdict.type} {item.name}: {item.value:.4g}"
            if item.bound is not None:
                side = "at least" if item.is_minimum else "at most"
                (logger.success if item.passed else logger.warning)(f"{text} ({side} {item.bound:.4g})")
            elif "_layer" not in item.name:
                logger.info(text)
        if verdict.fail_fast and not verdict.passed:
            failed = next(item for item in verdict.checks if not item.passed)
            relation, other = ("is below", "lower") if failed.is_minimum else ("exceeds", "raise")
            raise VerificationFailed(
                f"verify {verdict.type} after {verdict.run_id}: {failed.name}={failed.value:.4g} "
                f"{relation} {failed.bound:.4g}; "
                f"train longer, {other} the bound, or set fail_fast: false"
            )


def fit_phase(
    session: Session, run: RunConfig, phase: PhaseConfig, *, verifies: bool = False, stage: str | None = None
) -> StageRecord:
    """Train the model of a phase and save it.

    Under the name of another `stage` the student is a control, which reads the data of the run and adds no row."""
    # Trainer and module refer to each other: without this the last phase's teacher copy and optimiser state stay.
    gc.collect()
    name = stage or run.id
    seed = phase.seed if phase.seed is not None else run.seed
    seed_process(seed, get_rank())
    model = session.model_of("teacher" if phase.control else phase.trains or "student")
    if phase.control:  # a control leaves the teacher of the comparison as it is
        model = copy.deepcopy(model)
    decided = session.plan(phase, name, model.spec.embedder.d_model, run.id)
    phase = phase.model_copy(update={"lr": decided.value("lr")})
    check_lr_mult((name for name, _ in model.named_parameters()), phase.lr_mult)
    session.move_to(torch.device(decided.value("device")))
    if custom_layers_of(model):
        check_causal(model)
    if phase.memory_resize is not None:
        resize_slots(session, phase, model)
    is_stored = phase.teacher_logits is not None and not count_missing_logits(session, run, phase, decided)
    flops = _flops_per_token(session, phase, model, runs_teacher=not is_stored)
    if session.ranks is not None:
        send_command(session, session.ranks, run, phase, decided, seed, model, flops)
    sharer = session if phase.reads_teacher else dataclasses.replace(session, teacher=None)
    whole = model.to(session.device)
    if session.ranks is None:
        made = Assembled(build_objective(sharer, phase, decided, whole), None, lambda: None)
    else:
        made = assemble(sharer, phase, decided, whole, spec_of(model.spec))
    objective = made.objective
    schedule = objective.schedule if isinstance(objective, BlockwiseObjective) else None
    logger.subheader(
        f"{name}: {phase.phase} of the {'teacher (control)' if phase.control else phase.trains}, {phase.steps} steps"
    )
    verdicts: list[Verdict] = []
    rows: list[BenchmarkResult] = []
    callbacks = []
    if schedule is not None:
        callbacks.append(BlockwiseDistillation(schedule))
    if verifies:
        callbacks.append(Verification(lambda: verdicts.extend(verify(session, run))))
    if stage is None and (row := _row_name(session, run, phase)):
        callbacks.append(BenchmarkArtifacts(lambda: rows.extend(session.stage_row(row, model))))
    role = "control" if phase.control or stage is not None else phase.trains or "student"
    is_anew = is_fresh_init(session.manifest.model, phase.trains) and (
        phase.trains == "teacher" or TRANSPLANT not in session.ledger
    )
    if phase.phase == "pretrain" and not phase.control and is_anew:
        label = PROXY if phase.trains == "teacher" else ORIGIN
        session.labels[label] = f"trained from scratch on {session.corpus.name}"

    def save_final() -> None:
        made.gather()
        session.save(model, name, role)

    def save_kept(kept: str) -> None:
        session.save(model, f"kept/{kept}", role)

    train = functools.partial(
        fit,
        objective,
        manifest=session.manifest,
        run_dir=session.run_dir,
        save_final=save_final,
        flops_per_token=flops,
        shard=made.shard,
        callbacks=callbacks,
        save_kept=save_kept,
        work_after=0.0 if flops is None or stage else _work_after(session, run) / (flops * phase.tokens),
    )
    outcome = _fit(session, run, phase, decided, train)
    if session.ranks is not None:
        session.ranks.is_training = False
    model.requires_grad_(True).eval().to(session.device)
    if custom_layers_of(model):
        check_causal(model)
    if session.device.type != "cpu":  # cycles of references keep the phase's other tensors on the device
        release_memory()
    if outcome.steps < phase.steps:
        logger.info(f"{name}: ended after {outcome.steps} of {phase.steps} steps: {outcome.reason}")
    result = PhaseResult(
        id=name,
        phase=phase.phase,
        trains=role,
        steps=outcome.steps,
        tokens=outcome.tokens,
        seconds=outcome.seconds,
        checkpoint=session.relative_path(name),
        loss=outcome.loss,
        details={**_details(phase, schedule), "measured": outcome.measured},
        val_loss=outcome.held_out,
    )
    if outcome.held_out is not None:
        logger.info(f"{name}: held-out loss {outcome.held_out:.4f}")
    log_throughput(name, outcome.measured)
    append_event(
        session.run_dir,
        PHASE_FINISHED,
        phase=name,
        steps=outcome.steps,
        seconds=outcome.seconds,
        loss=outcome.loss,
    )
    return StageRecord(result, tuple(verdicts), tuple(rows))


def _flops_per_token(session: Session, phase: PhaseConfig, model: Model, *, runs_teacher: bool) -> float | None:
    """Return the work of a position in a phase, as the plan counts it, with the teacher's where the phase runs it.

    None if a custom layer does not declare its work: there is no MFU then.
    """
    has_teacher = runs_teacher and session.teacher is not model and phase.trains == "student"
    teacher = session.teacher if has_teacher else None
    return _flops_of(session, phase, model.spec, None if teacher is None else teacher.spec)


def _flops_of(session: Session, phase: PhaseConfig, spec: ModelSpec, teacher: ModelSpec | None) -> float | None:
    is_copied = phase.phase in BLOCK_PHASES and keeps_copied(phase, session.manifest.model, session.group)
    running = None if teacher is None else model_cost(teacher)
    return training_flops(phase, model_cost(spec), running, keeps_copied=is_copied)


def _work_after(session: Session, run: RunConfig) -> float:
    """Return the FLOPs of the group's phases that train after `run`, one process.

    0 where a batch is still to be measured or a custom layer does not declare its work.
    """
    total = 0.0
    for other in session.group.runs[[item.id for item in session.group.runs].index(run.id) + 1 :]:
        phase = other.train
        if phase is None or other.id in session.ledger:
            continue
        spec = session.manifest.model
        teacher = spec.teacher.manifest if spec.teacher is not None else None
        trained = teacher if teacher is not None and (phase.trains == "teacher" or phase.control) else spec
        flops = _flops_of(session, phase, trained, teacher if phase.trains == "student" else None)
        if flops is None or phase.batch_size == "auto":
            return 0.0
        total += flops * phase.tokens
    return total


def log_throughput(name: str, measured: dict[str, float]) -> None:
    """Print how fast a phase ran and what it took; warn when it waited for its data."""
    if "tokens_per_s" not in measured:
        return
    parts = [f"{measured['tokens_per_s']:,.0f} tokens/s"]
    if "mfu" in measured:
        parts.append(f"{measured['mfu']:.1%} MFU")
    parts += [
        f"{label} {measured[key] / 2**20:,.0f} MiB"
        for key, label in (
            ("peak_allocated_bytes", "peak allocated"),
            ("peak_reserved_bytes", "reserved"),
            ("peak_resident_bytes", "peak resident"),
        )
        if key in measured
    ]
    logger.info(f"{name}: {', '.join(parts)}")
    if measured["data_wait_share"] > WAIT_WARNING:
        logger.warning(
            f"{name}: waited for data {measured['data_wait_share']:.0%} of the time; raise train.num_workers, "
            "or prepare the data into a token file"
        )


def _fit(
    session: Session,
    run: RunConfig,
    phase: PhaseConfig,
    decided: RuntimePlan,
    train: Callable[[PhaseConfig, PhaseData, RuntimePlan], FitOutcome],
) -> FitOutcome:
    """Train; where memory runs out, once more with a smaller batch, from the last saved state or the beginning.

    Raises:
        OutOfMemory: memory ran out again, or where there is no state to go back to; plan.json has the smaller batch.
        BatchReduced: on one of several ranks, which have to be started again.
    """
    failure: OutOfMemory | None = None
    for attempt in (1, 2):
        train_windows, val = session.training_windows(phase), session.windows("val", phase.block_size)
        data = PhaseData(train_windows, val, session.stream_seed(run), session.stream_start(run))
        try:
            return train(phase, data, decided)
        except OutOfMemory as error:
            # without its traceback, which holds the optimiser's state
            failure = OutOfMemory(str(error), step=error.step, is_clean=error.is_clean)
        if get_world_size() > 1:
            raise reduce_for_all_ranks(session, run.id, phase, decided, failure)
        made_smaller = None if attempt == 2 else reduce_batch(session, run.id, phase, decided, str(failure))
        if made_smaller is None:
            break
        phase, decided = made_smaller
        has_state = has_saved_state(state_path(session.run_dir, decided.phase))
        if not has_state and not failure.is_clean:
            raise OutOfMemory(
                f"{failure}; no state was saved before it, so the phase begins again with batch_size="
                f"{phase.batch_size} x {phase.gradient_accumulation_steps}: caramba resume {show_path(session.run_dir)}"
            )
        release_memory()
        logger.warning(
            f"{failure}; continuing with batch_size={phase.batch_size} x {phase.gradient_accumulation_steps}"
        )
        append_event(session.run_dir, "out_of_memory", phase=decided.phase, step=failure.step)
        torch.manual_seed(phase.seed if phase.seed is not None else run.seed)
    raise OutOfMemory(
        f"{failure}; use a smaller block_size, activation_checkpointing=full or a smaller model; the last saved state "
        f"is safe: caramba resume {show_path(session.run_dir)}"
    )


def _details(phase: PhaseConfig, schedule: BlockSchedule | None) -> dict[str, Any]:
    if schedule is None:
        return {}
    return {"steps_planned": phase.steps, "blocks": schedule.summary()}


def verify(session: Session, run: RunConfig) -> tuple[Verdict, ...]:
    """Run a run's verifications on the current teacher and student."""
    session.move_to(session.device)  # Lightning leaves what several ranks trained on the CPU
    teacher, student = session.model_of("teacher"), session.model_of("student")
    return evaluation.verify(
        run.verify,
        teacher.eval(),
        student.eval(),
        session.windows,
        run_id=run.id,
        device=session.device,
        tokenizer=session.corpus.tokenizer,
    )


def _row_name(session: Session, run: RunConfig, phase: PhaseConfig) -> str | None:
    if not is_main_process() or session.manifest.model.teacher is None:
        return None
    if phase.control:
        return "teacher_continued"
    return f"student_{phase.phase}" if phase.trains == "student" else None


def _skip(session: Session, run: RunConfig, phase: PhaseConfig, reason: str) -> None:
    logger.info(f"{run.id}: skipped, {reason}")
    result = PhaseResult(run.id, phase.phase, phase.trains or "student", 0, 0, 0.0, "", None, skipped=reason)
    session.ledger.add(StageRecord(result))


WINDOWS = 8
"""Windows of training text, spread over it, in which it is measured what is read of the slots."""


def resize_slots(session: Session, phase: PhaseConfig, model: Model) -> None:
    """Resize a model's memory slots by `train.memory_resize`; its optimiser is made after it.

    The same weights, text and seed give the same slots, so that a phase that resumes resizes as before. Checkpoints of
    earlier phases stay as they are.
    """
    resize = phase.memory_resize
    assert resize is not None
    windows = session.training_windows(phase)
    tokens = torch.stack([windows[index][0] for index in spread_windows(len(windows), WINDOWS)])
    model.eval().to(session.device)
    stats = model.get_memory_stats(tokens.to(session.device))
    model.resize_memory(resize.slots, is_open=resize.open)
    logger.info(
        f"memory slots: {resize.slots} from here on; before, of their number {stats['utilization']:.0%} were in use "
        f"and {stats['dead_share']:.0%} dead"
    )


def train_variant(session: Session, run: RunConfig) -> None:
    """Train the variant that a run names, and measure it under the group's benchmarks, unless it is finished.

    Every variant reads the data from its beginning, so that those of one seed see the same tokens in the same order.
    """
    if run.id in session.ledger:
        drop_state(session.run_dir, run.id)  # a kill may have come before it went
        session.retry_failed_benchmarks(run.id)
        return
    assert run.exp is not None
    assert run.train is not None
    spec = variant(session.manifest.model, run.exp)
    cost = model_cost(spec)
    logger.info(f"{run.id}: {run.exp}, {cost.params:,} parameters")
    model = build_model(spec, seed=run.seed).to(session.device)
    shadow = dataclasses.replace(session, student=model)
    with until_recorded():
        record = fit_phase(shadow, run, run.train)
        row = run.id.replace(".", "_")  # a point separates the parts of a metric's key
        suite = [bench for bench in session.group.benchmarks if not isinstance(bench.config, STAGED)]
        results = session.measure(suite, {row: model.to(session.device)})
        details = {
            **record.phase.details,
            "exp": run.exp,
            "row": row,
            "params": cost.params,
            "d_ff": feed_forward_widths(spec),
            "kv_bytes_per_token": float(cost.kv_bytes_per_token(KVCacheKind.FP16)),
        }
        session.ledger.add(
            dataclasses.replace(
                record,
                phase=dataclasses.replace(record.phase, details=details),
                benchmarks=tuple(dataclasses.replace(item, id=f"{item.id}.{row}") for item in results),
            )
        )
    drop_state(session.run_dir, run.id)


def fit_apart(
    session: Session,
    phase: PhaseConfig,
    plan: RuntimePlan,
    model: Model,
    folder: Path,
    *,
    seed: int,
    callbacks: Sequence[Callback],
    flops_per_token: float | None = None,
) -> FitOutcome:
    """Train `model` by `phase` on the session's text from its beginning, through `fit`, as any phase is trained.

    Args:
        folder: what the training writes goes there; the caller removes it.
        seed: of the order of the windows.
        callbacks, flops_per_token: as for `fit`.
    """
    assert isinstance(phase.block_size, int)
    return fit(
        build_objective(session, phase, plan, model),
        phase,
        PhaseData(
            session.windows("train", phase.block_size),
            session.windows("val", phase.block_size),
            seed=seed,
            start=0,
        ),
        plan,
        manifest=disable_logging(session.manifest),
        run_dir=folder,
        save_final=lambda: None,
        flops_per_token=flops_per_token,
        callbacks=callbacks,
    )
