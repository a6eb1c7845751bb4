"""Before anything trains, every key left to `auto` becomes a value; a batch follows memory and the number of ranks."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from caramba import __version__
from caramba.config.estimate import ParallelLayout, model_cost, rank_bytes, variant
from caramba.config.manifest import RunConfig
from caramba.config.train import PhaseConfig, check_batch_is_given
from caramba.console import logger
from caramba.errors import BatchReduced, ConfigError, OutOfMemory
from caramba.experiment.planning import (
    LEAST_SECONDS,
    SHARE,
    Budget,
    PlanningContext,
    StepCandidate,
    Trial,
    TrialProcess,
    decide,
)
from caramba.experiment.probe import MODULE, request_of
from caramba.experiment.session import Session
from caramba.runs.environment import sharing_workers
from caramba.runs.events import append_event
from caramba.runs.exit_codes import REDUCED_REASON
from caramba.runs.files import write_json
from caramba.runs.shell import show_path
from caramba.runtime import (
    Decision,
    RuntimePlan,
    address_limit,
    cached_plan,
    choose_device,
    device_facts,
    free_bytes,
    get_local_world_size,
    get_rank,
    get_world_size,
    load_plan,
    plan_path,
    read_valid_plans,
    release_memory,
    save_plan,
    signature_of,
    store_plan,
)
from caramba.train import has_saved_state, state_path, workers_needed

BATCH = ("batch_size", "gradient_accumulation_steps")
SETTLED = (*BATCH, "compile_model", "activation_checkpointing", "num_workers", "dtype")
RANKS, DATA_PARALLEL = "ranks.json", "data_parallel"
PRECISION = ("dtype", "weights", "precision")
MEASURED = ("precision", "step_seconds", "planning")
ENDING_S = 5.0  # of the budget: ending a process that compiles, moving models back, timing the data
UNMEASURED = {"compile_model": False, "activation_checkpointing": "none", "num_workers": 0}


def resolve_plans(session: Session) -> None:
    """Replace `auto` in the group's runs by the values of its plan, and leave the plans in `session.measured`.

    A run that has begun resumes by its own plan.json. Else `plan=PATH` names the plan, or the cache holds it, or it is
    measured and kept there.

    Raises:
        ConfigError: a plan that was named does not hold the run, or `plan=off` leaves a batch size open.
    """
    runs: list[RunConfig] = []
    for run in session.group.runs:
        phase = run.train
        if phase is not None:
            # As the run begins: a student that is made later has another description than the manifest's.
            session.plan_signatures[run.id] = _signature(session, run, phase)
            made = _begun(session, run, phase)
            if made is None and phase.measured_keys:
                made = _found_or_measured(session, run, phase)
            if made is not None:
                session.measured[run.id] = made
                run = run.model_copy(update={"train": apply_plan(phase, made)})
        runs.append(run)
    asked = session.manifest.plan
    if asked not in ("auto", "refresh", "off") and not session.measured:
        logger.warning(f"plan={asked}: nothing is left to auto, so it decides nothing; give a key the value auto")
    session.group = session.group.model_copy(update={"runs": tuple(runs)})


def apply_plan(phase: PhaseConfig, made: RuntimePlan) -> PhaseConfig:
    """Return the phase with what a plan decided in place of what it left open."""
    update: dict[str, Any] = {key: made.decisions[key].value for key in SETTLED if key in made.decisions}
    return phase.model_copy(update=update | {"activation_checkpoint_threshold": None})


def _begun(session: Session, run: RunConfig, phase: PhaseConfig) -> RuntimePlan | None:
    """Return the measured part of the plan that a run of this directory was started with."""
    path = session.run_dir / "plan.json"
    has_begun = run.id in session.ledger or state_path(session.run_dir, run.id).exists()
    plan = read_valid_plans(path).get(run.id)
    if plan is None or not (phase.measured_keys or _is_reduced(plan, phase)):
        return None
    signature = _signature(session, run, phase)
    if plan.signature != signature:
        if not has_begun:
            return None
        if run.id not in session.ledger:
            logger.warning(
                f"{run.id}: resumes as it was planned for another machine or version: its data is read by that batch"
            )
    kept = {key: plan.decisions[key] for key in (*SETTLED, *MEASURED) if key in plan.decisions}
    return RuntimePlan(run.id, signature, plan.facts, kept)


def _is_reduced(plan: RuntimePlan, phase: PhaseConfig) -> bool:
    given = plan.decisions.get("gradient_accumulation_steps")
    return given is not None and given.value != phase.gradient_accumulation_steps


def _found_or_measured(session: Session, run: RunConfig, phase: PhaseConfig) -> RuntimePlan:
    asked = session.manifest.plan
    if asked == "off":
        return _unmeasured(session, run, phase)
    if asked not in ("auto", "refresh"):
        return _given(Path(asked), run, phase, _signature(session, run, phase))
    signature = _signature(session, run, phase)
    found = cached_plan(signature) if asked == "auto" else None
    if found is not None:
        logger.info(f"{run.id}: planned before: {_summary(found)}")
        return dataclasses.replace(found, phase=run.id)
    made = _measure(session, run, phase, signature)
    logger.path(str(store_plan(made)), "plan")
    return made


def _unmeasured(session: Session, run: RunConfig, phase: PhaseConfig) -> RuntimePlan:
    check_batch_is_given(run.id, phase)
    decisions = {
        key: Decision(value, "auto: plan=off measures nothing")
        for key, value in UNMEASURED.items()
        if getattr(phase, key) == "auto"
    }
    return RuntimePlan(run.id, _signature(session, run, phase), {}, decisions)


def _given(path: Path, run: RunConfig, phase: PhaseConfig, signature: str) -> RuntimePlan:
    if not path.is_file():
        raise ConfigError(f"plan={path}: no such file; give a plan.json, or auto, refresh or off")
    plans = load_plan(path)
    plan = plans.get(run.id) or (next(iter(plans.values())) if len(plans) == 1 else None)
    if plan is None:
        raise ConfigError(f"plan={path}: plans {', '.join(plans)}, and the run is {run.id!r}; give its own plan")
    missing = [
        key
        for key in phase.measured_keys
        if key in SETTLED and plan.decisions.get(key, Decision("auto", "")).value == "auto"
    ]
    if missing:
        raise ConfigError(f"plan={path}: decides no {', '.join(missing)} for run {run.id!r}; give it a value")
    if plan.signature != signature:
        logger.warning(f"plan={path}: made for another machine or manifest, and used as it is")
    keys = {*phase.measured_keys, *(PRECISION if _leaves_precision(phase) else ())}
    if _is_reduced(plan, phase):  # a batch and how often it is accumulated belong together
        keys.add("gradient_accumulation_steps")
    kept = {
        key: dataclasses.replace(item, reason=f"auto: plan={path}: {item.reason}")
        for key, item in plan.decisions.items()
        if key in keys
    }
    return RuntimePlan(run.id, signature, plan.facts, kept)


def _signature(session: Session, run: RunConfig, phase: PhaseConfig) -> str:
    device = choose_device(phase.device or session.manifest.device)
    has_windows = phase.batch_size == "auto"
    return signature_of(
        phase,
        device_facts(device),
        caramba=__version__,
        limit=address_limit() if device.type == "cpu" else None,
        model=session.shapes_of("student") or session.manifest.model.model_dump(mode="json"),
        teacher=session.shapes_of("teacher"),
        exp=run.exp,
        kernels=session.manifest.kernels,
        documents=session.group.data.keeps_documents_apart,
        windows=len(session.windows("train", phase.block_size)) if has_windows else None,
        deterministic=session.manifest.deterministic,
        sharing=sharing_workers(),
        **_ranks_of(session),
    )


def _ranks_of(session: Session) -> dict[str, Any]:
    """Return what a plan for several ranks depends on, besides what one for one process does."""
    if get_world_size() == 1:
        return {}
    parallel = session.manifest.parallel.model_dump(mode="json", exclude={"dp"})
    return {"parallel": parallel, "ranks": get_world_size(), "of_node": get_local_world_size()}


def _measure(session: Session, run: RunConfig, phase: PhaseConfig, signature: str) -> RuntimePlan:
    """Measure what a phase leaves open, with the session's own models off its device meanwhile."""
    device = choose_device(phase.device or session.manifest.device)
    logger.subheader(f"{run.id}: measuring {', '.join(phase.measured_keys)} on {device.type}")
    models = [model for model in (session.teacher, session.student) if model is not None]
    for model in models if device.type != "cpu" else []:
        model.to("cpu")
    release_memory()
    open_phases = [phase for _, phase in session.group.trained if phase.measured_keys]
    budget, began, trials = Budget.of_phases(len(open_phases)), time.perf_counter(), list[Trial]()
    ground = _ground(session, run, phase, device)
    try:
        with TrialProcess(MODULE, request_of(session, run)) as process:

            def measure(candidate: StepCandidate) -> Trial:
                # The first trial starts the process, and without it there is no plan.
                left = budget.left if trials else max(budget.left, LEAST_SECONDS)
                trial = process.measure(candidate, left - ENDING_S)
                if not trial.refusal:
                    trial = dataclasses.replace(trial, peak_bytes=max(0, trial.peak_bytes + ground.rank_bytes))
                if trial.refusal and not trial.is_out_of_memory:
                    budget.skip(candidate, trial.refusal)
                logger.info(f"plan {run.id}: {_said(trial, ground)}")
                trials.append(trial)
                return trial

            decisions = decide(phase, ground, measure, budget)
    finally:
        for model in models:
            model.to(session.device)
    if phase.num_workers == "auto":
        decisions["num_workers"] = workers_needed(
            session.windows("train", phase.block_size),
            apply_plan(phase, RuntimePlan(run.id, signature, {}, decisions)),
            decisions["step_seconds"].value / phase.gradient_accumulation_steps,
        )
    made = RuntimePlan(run.id, signature, device_facts(device), decisions)
    spent = time.perf_counter() - began
    append_event(session.run_dir, "planned", run=run.id, seconds=spent)
    why = explain_share(spent, decisions["step_seconds"].value * phase.steps, trials)
    if why:
        logger.info(f"{run.id}: {why}")
    logger.success(f"{run.id}: {_summary(made)}")
    return made


def explain_share(spent: float, phase_seconds: float, trials: Sequence[Trial]) -> str:
    """Return why planning took more than its share of a phase, empty where it did not."""
    if spent <= SHARE * phase_seconds:
        return ""
    measured = [trial for trial in trials if not trial.refusal]
    starting = sum(trial.start_seconds for trial in measured)
    stepping = sum(sum(trial.seconds) for trial in measured) - starting
    rest = max(0.0, spent - starting - stepping)
    return (
        f"planning took {spent:.0f} s, {spent / phase_seconds:.0%} of the {phase_seconds:.0f} s that the phase takes: "
        f"{len(trials)} trials with {starting:.0f} s of compilation and first steps, {stepping:.0f} s of steps and "
        f"{rest:.0f} s of starting processes and building models; later runs reuse the plan, and set keys need none"
    )


def _ground(session: Session, run: RunConfig, phase: PhaseConfig, device: torch.device) -> PlanningContext:
    base = session.plan(phase, run.id)
    most = len(session.windows("train", phase.block_size)) if phase.batch_size == "auto" else 1
    sharers = sharing_workers() * (get_local_world_size() if device.type == "cpu" else 1)
    return PlanningContext(
        room_bytes=free_bytes(device, sharers),
        most=most,
        rank_bytes=_rank_bytes(session, run, phase, device),
        ranks=get_world_size(),
        dtype=base.value("dtype"),
        compares_dtypes=_leaves_precision(phase) and base.value("dtype") == "bfloat16",
        checkpoints=phase.phase in ("pretrain", "global"),
        compile_modes=("default", "reduce-overhead", "max-autotune") if device.type == "cuda" else ("default",),
    )


def _rank_bytes(session: Session, run: RunConfig, phase: PhaseConfig, device: torch.device) -> int:
    """Return how much more a rank holds than the one process that the step is measured in."""
    if get_world_size() == 1:
        return 0
    model = session.teacher if phase.control or phase.trains == "teacher" else session.student
    spec = session.manifest.model if model is None else model.spec
    if run.exp is not None:
        spec = variant(session.manifest.model, run.exp)
    nodes = max(1, get_world_size() // get_local_world_size())
    spread = ParallelLayout(session.manifest.parallel, session.data_ranks, nodes)
    # A trial on a CPU counts what is taken beyond its model, and there a sharded one waits next to its parts.
    return rank_bytes(phase, model_cost(spec), spread, keeps_whole=device.type == "cpu")


def _leaves_precision(phase: PhaseConfig) -> bool:
    keys = (phase.dtype, phase.use_amp, phase.amp_dtype)
    return keys == ("auto", "auto", "auto") and phase.float8 == "none"


def _said(trial: Trial, ground: PlanningContext) -> str:
    if trial.refusal:
        return f"{trial.candidate}: {trial.refusal}"
    return (
        f"{trial.candidate}: {trial.peak_bytes / 1e9:.2f} of {ground.room_bytes / 1e9:.2f} GB, "
        f"{trial.step_seconds * 1e3:.1f} ms, {trial.samples_per_s:.1f} sequences/s"
    )


def _summary(made: RuntimePlan) -> str:
    shown = [f"{key}={made.decisions[key].value}" for key in SETTLED if key in made.decisions]
    return ", ".join(shown) or "nothing to decide"


def reduce_batch(
    session: Session, run_id: str, phase: PhaseConfig, decided: RuntimePlan, why: str
) -> tuple[PhaseConfig, RuntimePlan] | None:
    """Return a phase and its plan with a smaller batch and as many more accumulated: each step sees the same samples.

    Both the run's plan.json and, where it was measured, the cached plan say so from now on. Several ranks may call this
    at a time: they write the same. None where there is no smaller batch.
    """
    size = int(phase.batch_size)
    parallel = session.manifest.parallel
    parts = parallel.micro_batches if parallel.strategy == "pipeline" else 1
    smaller = next((part for part in range(size // 2, 0, -1) if size % part == 0 == part % parts), None)
    if smaller is None:
        return None
    times = phase.gradient_accumulation_steps * size // smaller
    reason = f"{REDUCED_REASON}{why}; {smaller} x {times} sequences a step are as many as before"
    phase, changed = _set_batch(session, run_id, phase, (smaller, times), reason, decided.facts)
    measured = session.measured[run_id]
    if plan_path(measured.signature).is_file() and (kept := cached_plan(measured.signature)) is not None:
        store_plan(dataclasses.replace(kept, decisions=kept.decisions | changed))
    decided = dataclasses.replace(decided, signature=measured.signature, decisions=decided.decisions | changed)
    save_plan(session.run_dir / "plan.json", decided)
    return phase, decided


def _set_batch(
    session: Session,
    run_id: str,
    phase: PhaseConfig,
    values: tuple[int, int],
    reason: str,
    facts: dict[str, Any],
) -> tuple[PhaseConfig, dict[str, Decision]]:
    """Put another batch into the plan of a run; return its phase with it, and the decisions."""
    keys: dict[str, int] = dict(zip(BATCH, values, strict=True))
    changed = {key: Decision(value, reason) for key, value in keys.items()}
    measured = session.measured.get(run_id)
    if measured is None:
        run = next(item for item in session.group.runs if item.id == run_id)
        signature = session.plan_signatures.get(run_id) or _signature(session, run, phase)
        measured = RuntimePlan(run_id, signature, facts, {})
    session.measured[run_id] = dataclasses.replace(measured, decisions=measured.decisions | changed)
    return phase.model_copy(update=keys), changed


def reduce_for_all_ranks(
    session: Session, run_id: str, phase: PhaseConfig, decided: RuntimePlan, failure: OutOfMemory
) -> OutOfMemory:
    """Return what a rank ends with when memory ran out on it: the others wait for it within a step, so that all have
    to be started again, with the smaller batch that plan.json has from now on."""
    made = reduce_batch(session, run_id, phase, decided, str(failure))
    where = f"rank {get_rank()} of {get_world_size()}: {failure}"
    if made is None:
        return OutOfMemory(
            f"{where}, and there is no smaller one; use a smaller block_size, activation_checkpointing=full or more "
            f"ranks; the last saved state is safe: caramba resume {show_path(session.run_dir)}"
        )
    smaller = made[0]
    has_state = has_saved_state(state_path(session.run_dir, decided.phase))
    begins = "resumes from its last saved state" if has_state else "begins again"
    return BatchReduced(
        f"{where}; once the ranks are started again the phase {begins} with batch_size={smaller.batch_size} x "
        f"{smaller.gradient_accumulation_steps}: caramba resume {show_path(session.run_dir)}"
    )


def keep_global_batch(session: Session) -> None:
    """Accumulate more or less in every phase of the group, where there are other ranks than the run began with.

    ranks.json holds how many shared the data then; a phase that was resized before has its own in plan.json.

    Raises:
        ConfigError: the samples of a step do not divide among the ranks.
    """
    path, now = session.run_dir / RANKS, session.data_ranks
    if not path.is_file():
        write_json(path, {DATA_PARALLEL: now})
        return
    first = int(json.loads(path.read_text())[DATA_PARALLEL])
    plan_file = session.run_dir / "plan.json"
    plans = load_plan(plan_file) if plan_file.is_file() else {}
    runs = []
    for run in session.group.runs:
        before = first if run.train is None else _ranks_of_batch(plans.get(run.id), run.train, first)
        if run.train is not None and before != now:
            batch_size, times = resize_batch(run.id, run.train, before, now)
            reason = f"the run began with {before} ranks and resumes with {now}: each step sees as many samples"
            phase, _ = _set_batch(session, run.id, run.train, (batch_size, times), reason, {})
            logger.info(f"{run.id}: {now} ranks where there were {before}: batch_size={batch_size} x {times}")
            run = run.model_copy(update={"train": phase})
        runs.append(run)
    session.group = session.group.model_copy(update={"runs": tuple(runs)})


def resize_batch(name: str, phase: PhaseConfig, before: int, now: int) -> tuple[int, int]:
    """Return batch_size and gradient_accumulation_steps with which `now` ranks take the steps of `before`.

    Raises:
        ConfigError: they cannot.
    """
    assert isinstance(phase.batch_size, int)
    batch_size, samples = phase.batch_size, phase.batch_size * phase.gradient_accumulation_steps * before
    if samples % now:
        raise ConfigError(
            f"run {name!r}: a step has {samples} samples (batch_size={batch_size} x "
            f"{phase.gradient_accumulation_steps} on {before} ranks), which {now} ranks do not share evenly; "
            f"start a divisor of {samples}"
        )
    own = samples // now
    size = next(part for part in range(min(batch_size, own), 0, -1) if own % part == 0)
    return size, own // size


def _ranks_of_batch(planned: RuntimePlan | None, phase: PhaseConfig, first: int) -> int:
    """Return how many ranks the batch of a phase is for: those of its plan, where it goes by that, else the first."""
    if planned is None or DATA_PARALLEL not in planned.decisions:
        return first
    is_its_own = all(planned.value(key) == getattr(phase, key) for key in BATCH)
    return int(planned.value(DATA_PARALLEL)) if is_its_own else first
