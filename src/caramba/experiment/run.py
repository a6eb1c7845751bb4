"""run(): the whole pipeline of a manifest, on one page."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from caramba import artifacts
from caramba.artifacts.write import REPORT_FILE
from caramba.config.benchmark import STAGED, BenchmarkConfig, LadderConfig, OptimizersConfig
from caramba.config.generate import ChatConfig, SampleConfig
from caramba.config.manifest import GroupConfig, Manifest, RunConfig
from caramba.console import logger
from caramba.errors import AgentError, BudgetExceeded, CarambaError, VerificationFailed
from caramba.experiment.controls import measure_controls
from caramba.experiment.ladder import climb_ladder
from caramba.experiment.objectives import (
    check_block_schedules,
    check_builds,
    check_lora_targets,
    check_precisions,
    check_teacher_caches,
)
from caramba.experiment.ranks import check_split, follow
from caramba.experiment.resolve_plans import keep_global_batch, resolve_plans
from caramba.experiment.samples import check_chats, check_samples, run_chat, write_samples
from caramba.experiment.session import Session, StageLedger, StageRecord
from caramba.experiment.stages import hold, train_run, train_variant, verify
from caramba.experiment.surgery import check_calibration, transplant_student
from caramba.experiment.text_check import check_text
from caramba.layer import attention_backends
from caramba.result import BenchmarkResult, PhaseResult, RunResult, to_plain
from caramba.runs import manifest_sha256
from caramba.runs.events import append_event
from caramba.runs.files import sha256_of, write_json
from caramba.runtime import Ranks, apply_determinism, apply_threads, join_ranks

FINAL, VERIFY = "final", "verify"


def run(manifest: Manifest, run_dir: Path) -> tuple[RunResult, ...]:
    """Train, verify and benchmark every selected group of `manifest` in `run_dir`, and write its artifacts.

    A finished stage is never repeated, so calling this again after an interrupt resumes where the run stopped. With
    several groups each has a directory of its own below `groups/`.

    Raises:
        VerificationFailed: a check with fail_fast did not pass; artifacts of all that ran are written first.
    """
    apply_determinism(manifest.deterministic)
    with join_ranks(manifest.parallel, manifest.device) as ranks:
        if ranks is not None and ranks.rank > 0:
            follow(manifest, run_dir, ranks)
            return ()
        return run_groups(manifest, run_dir, ranks)


def run_groups(manifest: Manifest, run_dir: Path, ranks: Ranks | None) -> tuple[RunResult, ...]:
    """Run the selected groups in order; where ranks have joined, on rank 0 of them."""
    groups = manifest.groups_to_run()
    if len(groups) == 1:
        return (run_group(manifest, groups[0], run_dir, run_dir, ranks),)
    results = tuple(run_group(manifest, group, run_dir, run_dir / "groups" / group.name, ranks) for group in groups)
    status = "failed" if any(map(has_failed, results)) else "finished"
    write_json(run_dir / "result.json", {"status": status, "groups": [group.name for group in groups]})
    return results


def run_group(
    manifest: Manifest, group: GroupConfig, run_dir: Path, folder: Path, ranks: Ranks | None = None
) -> RunResult:
    """Run one group: phases in order, then the final checks and benchmarks from the saved weights, then artifacts."""
    folder.mkdir(parents=True, exist_ok=True)
    apply_threads(folder / "plan.json")
    logger.header(manifest.name, f"group {group.name}: {', '.join(run.id for run in group.runs) or 'no training'}")
    append_event(folder, "group_started", group=group.name)
    check_builds(manifest)  # before the data is read, which may take long
    check_precisions(manifest, group, StageLedger(folder))
    session = Session.open(manifest, group, folder, ranks)
    if ranks is not None:
        check_split(session)
    resolve_plans(session)
    if ranks is not None:
        keep_global_batch(session)
    group = session.group
    if session.makes_student:
        check_calibration(session)
    check_block_schedules(session)
    check_lora_targets(session)
    check_teacher_caches(session)
    if session.makes_student:
        check_text(session)
    if any(run.sample is not None for run in group.runs):
        check_samples(session)
    if any(run.mode == "chat" for run in group.runs):
        check_chats(session)
    failure: VerificationFailed | None = None
    try:
        with attention_backends(session.device, session.attention):
            for item in group.runs:
                if item.exp is not None:
                    train_variant(session, item)
                elif item.train is not None:
                    train_run(session, item, is_last=item is last_trained(group))
                elif item.verify:
                    verify_run(session, item)
                elif item.mode in ("sample", "chat"):
                    write_texts(session, item)
            finish(session)
    except VerificationFailed as error:
        failure = error
    result = collect(session, run_dir)
    if proxy := result.labels.get("proxy"):
        logger.info(f"proxy: the teacher of these numbers was {proxy}")
    index = artifacts.write(result, folder)
    status = "failed" if failure or has_failed(result) else "finished"
    write_json(folder / "result.json", {"status": status, **to_plain(result)})
    append_event(folder, "group_finished", group=group.name, artifacts=len(index.entries))
    logger.artifacts_summary({entry.path: str(Path(index.root) / entry.path) for entry in index.entries})
    if failure is not None:
        raise failure
    if status == "finished":
        draft_paper(manifest, group.name, run_dir, folder)
    return result


def has_failed(result: RunResult) -> bool:
    """Whether a benchmark failed: a resume has work to do."""
    return any(bench.error is not None for bench in result.benchmarks)


def finish(session: Session) -> None:
    """Benchmark and verify what the phases saved: models are read back from disk, no training state is kept."""
    if session.has_only_variants:
        return
    if session.student is None and (session.trains("student") or session.group.benchmarks):
        transplant_student(session)
    read_back(session)
    staged = [bench for bench in session.group.benchmarks if isinstance(bench.config, STAGED)]
    measure_final(session, [bench for bench in session.group.benchmarks if bench not in staged])
    for bench in staged:
        if isinstance(bench.config, LadderConfig):
            climb_ladder(session, bench)
        elif isinstance(bench.config, OptimizersConfig):
            from caramba.experiment.optimizer_table import measure_optimizers

            measure_optimizers(session, bench)
        else:
            measure_controls(session, bench)
    last = last_trained(session.group)
    if VERIFY not in session.ledger and last is not None and last.verify:
        session.ledger.add(StageRecord(PhaseResult.untrained(VERIFY, VERIFY), verdicts=verify(session, last)))
    if VERIFY in session.ledger:
        hold(session.ledger[VERIFY].verdicts)


def measure_final(session: Session, benchmarks: Sequence[BenchmarkConfig]) -> None:
    """Run the benchmarks of the final models that are not on record, and those that failed: what they lacked, memory
    say, may be there now."""
    before = session.ledger[FINAL].benchmarks if FINAL in session.ledger else ()
    measured = {result.id: result for result in before if result.error is None}
    left = [bench for bench in benchmarks if bench.id not in measured]
    if FINAL in session.ledger and not left:
        return
    named = (("teacher", session.teacher), ("student", session.student))
    models = {name: model.eval() for name, model in named if model is not None}
    measured |= {result.id: result for result in session.measure(left, models)}
    record = StageRecord(
        PhaseResult.untrained(FINAL, FINAL), benchmarks=tuple(measured[bench.id] for bench in benchmarks)
    )
    session.ledger.put(record)


def read_back(session: Session) -> None:
    """Replace both models by what the last phase that trained them saved."""
    for role in ("teacher", "student"):
        done = [phase for phase in session.phases() if phase.trains == role and not phase.skipped]
        if done:
            session.reload(done[-1].id, role)


def verify_run(session: Session, run: RunConfig) -> None:
    """Verify the models as they are, for a run that trains none, unless it is done."""
    if session.student is None:
        transplant_student(session)
    if run.id not in session.ledger:
        read_back(session)
        session.ledger.add(StageRecord(PhaseResult.untrained(run.id, run.id), verdicts=verify(session, run)))
    hold(session.ledger[run.id].verdicts)


def write_texts(session: Session, run: RunConfig) -> None:
    """Generate from the model as it is, or hold the conversation of a run, unless that is done."""
    if run.id in session.ledger:
        return
    config = run.sample or run.chat or ChatConfig()
    if config.role == "student" and session.student is None:
        transplant_student(session)
    read_back(session)
    if isinstance(config, SampleConfig):
        write_samples(session, run, config)
    elif not run_chat(session, run, config):
        return
    session.ledger.add(StageRecord(PhaseResult.untrained(run.id, run.id)))


def last_trained(group: GroupConfig) -> RunConfig | None:
    """Return the last run that trains, controls aside: what it leaves is what is verified and benchmarked."""
    return next((run for run in reversed(group.runs) if run.train and not run.train.control and not run.exp), None)


def collect(session: Session, run_dir: Path) -> RunResult:
    """Gather what the ledger holds into one result."""
    records = session.ledger.records()
    environment = json.loads((run_dir / "env.json").read_text()) if (run_dir / "env.json").is_file() else {}
    plan_file = session.run_dir / "plan.json"
    benchmarks: list[BenchmarkResult] = [result for record in records for result in record.benchmarks]
    return RunResult(
        name=session.manifest.name,
        run_id=run_dir.name,
        manifest_sha256=manifest_sha256(session.manifest),
        git_commit=environment.get("git_commit"),
        environment=environment,
        plan=json.loads(plan_file.read_text()) if plan_file.is_file() else {},
        phases=tuple(session.phases()),
        verdicts=tuple(verdict for record in records for verdict in record.verdicts),
        benchmarks=tuple(benchmarks),
        transplant=next((record.transplant for record in records if record.transplant), None),
        labels={**session.labels, **session.data_labels()},
    )


def draft_paper(manifest: Manifest, group: str, run_dir: Path, folder: Path) -> None:
    """Draft a paper in `folder/paper/`, or resume the one there, unless it is of these artifacts already.

    Raises:
        AgentError, BudgetExceeded: no version could be made. The run itself is finished then, its result written.
    """
    config = manifest.paper
    if config is None or not config.enabled:
        return
    from caramba.paper import PaperDrafter
    from caramba.paper.folder import PaperFolder

    name = group if folder != run_dir else None
    try:
        head = PaperFolder(folder / "paper").head()
        if head is not None and head.get("report_sha256") == sha256_of(folder / "artifacts" / REPORT_FILE):
            logger.info(f"paper: version {head['version']} is of these artifacts")
            return
        drafted = PaperDrafter(config).draft_sync(run_dir, update=True, group=name)
    except CarambaError as error:
        kind = type(error) if isinstance(error, AgentError | BudgetExceeded) else AgentError
        words = ["caramba", "paper", str(run_dir), *(["--group", name] if name else []), "--update"]
        raise kind(
            f"paper: {error}\nThe run is finished and its artifacts are written; to draft again: {shlex.join(words)}"
        ) from None
    append_event(folder, "paper_adopted", version=drafted.version, **dataclasses.asdict(drafted.spent))
    logger.path(str(drafted.pdf), "paper")
