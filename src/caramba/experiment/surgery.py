"""The stage before training: the student made from its teacher, and the statistics that this takes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import torch

from caramba.config.benchmark import PerplexityBenchmarkConfig
from caramba.config.model import SurgeryConfig
from caramba.config.surgery import first_tokens_apart
from caramba.console import logger
from caramba.data import TokenDataset, Windows, batches, documents_of, refuse_overlap, spread_windows
from caramba.distill import block_errors
from caramba.experiment.objectives import frozen
from caramba.experiment.session import Session, StageRecord
from caramba.model import Model
from caramba.result import PhaseResult, TransplantReport
from caramba.runs.files import home
from caramba.surgery import (
    CALIBRATED,
    LONGEST_WINDOW,
    Calibration,
    CalibrationText,
    HeldOutKL,
    build_student,
    choose_windows,
    pair_attention,
    refuse_short_windows,
)
from caramba.surgery import calibrate as measure_teacher

TRANSPLANT = "transplant"
ERROR_WINDOWS = 8
KL_TOKENS = 32_768


def transplant_student(session: Session) -> None:
    """Make the student from its teacher, once per run; the weights and the report are a stage of their own."""
    if session.student is not None:
        return
    if TRANSPLANT in session.ledger:
        session.retry_failed_benchmarks(TRANSPLANT)
        session.reload(TRANSPLANT, "student")
        return
    config = session.manifest.model
    surgery = config.surgery or SurgeryConfig()
    logger.subheader(f"transplant: {surgery.method}")
    began = time.perf_counter()
    # Surgery computes in float64, which MPS does not have.
    device = torch.device("cpu") if session.device.type == "mps" else session.device
    teacher = session.model_of("teacher").to(device)
    calibration = calibrate(session, surgery) if surgery.method in CALIBRATED else None
    student, report = build_student(teacher, config, surgery, calibration, session.seed_of("student"))
    if report.predicted_kl is not None:
        report = _with_measured_kl(session, teacher, student, report)
    teacher.to(session.device)
    student.to(session.device)
    windows = session.windows("train", _error_block(session))
    batch = next(batches(windows, range(min(ERROR_WINDOWS, len(windows))), ERROR_WINDOWS))
    x, _, *documents = (part.to(session.device) for part in batch)
    errors = block_errors(teacher, pair_attention(teacher, student), x, *documents)
    session.student = student
    session.save(student, TRANSPLANT, "student")
    rows = session.stage_row("student_transplant", student)
    phase = PhaseResult(
        id=TRANSPLANT,
        phase=TRANSPLANT,
        trains="student",
        steps=0,
        tokens=0,
        seconds=time.perf_counter() - began,
        checkpoint=session.relative_path(TRANSPLANT),
        details={"mean_block_error": sum(errors) / len(errors)},
    )
    session.ledger.add(StageRecord(phase, (), rows, dataclasses.replace(report, layer_errors=errors)))


def _with_measured_kl(session: Session, teacher: Model, student: Model, report: TransplantReport) -> TransplantReport:
    """Measure the untrained student's KL on windows of the validation split, as long as those of calibration."""
    windows = session.windows("val", min(_longest_block(session), LONGEST_WINDOW))
    chosen = spread_windows(len(windows), KL_TOKENS // windows.block_size or 1)
    tokens, documents = _stacked(windows, chosen)
    measured = HeldOutKL(teacher, tokens, documents).of(student)
    logger.info(
        f"kv_budget: predicted KL {report.predicted_kl:.4g} nats, measured {measured:.4g} without training on "
        f"{tokens.numel():,} tokens of the validation split"
    )
    return dataclasses.replace(report, measured_kl=measured)


def check_calibration(session: Session) -> None:
    """Refuse text that surgery could not calibrate on before anything is trained.

    Raises:
        ConfigError: there are fewer than two windows, or none is longer than the first tokens that stay exact.
        DataError: a document of the calibration text is in the evaluation split too.
    """
    surgery = session.manifest.model.surgery or SurgeryConfig()
    if TRANSPLANT not in session.ledger and surgery.method in CALIBRATED:
        calibration_windows(session, surgery)


def calibration_windows(session: Session, surgery: SurgeryConfig) -> tuple[TokenDataset, list[int], list[int]]:
    """Return windows of the train split, those to calibrate on and those to hold out, disjoint.

    They are as long as those of the group's runs, else of its perplexity benchmarks, and at most 2048 tokens.
    The evaluation split shares no position and no document with them.
    """
    windows = session.windows("train", min(_longest_block(session), LONGEST_WINDOW))
    refuse_short_windows(windows.block_size, first_tokens_apart(session.manifest.model.topology))
    chosen, held = choose_windows(len(windows), windows.block_size, surgery.calibration_tokens)
    refuse_overlap(session.corpus, windows, [*chosen, *held], what="surgery: calibration")
    return windows, chosen, held


def _longest_block(session: Session) -> int:
    blocks = [phase.block_size for _, phase in session.group.trained]
    blocks = blocks or [
        bench.config.block_size
        for bench in session.group.benchmarks
        if isinstance(bench.config, PerplexityBenchmarkConfig)
    ]
    return max(blocks, default=LONGEST_WINDOW)


def calibrate(session: Session, surgery: SurgeryConfig) -> Calibration:
    """Measure the teacher on windows of the train split. Statistics are kept under CARAMBA_HOME."""
    windows, chosen, held = calibration_windows(session, surgery)
    (measured, documents), (by, held_documents) = (_stacked(windows, places) for places in (chosen, held))
    text = CalibrationText(measured, by, documents, held_documents)
    logger.info(f"calibration: {len(chosen)} windows of {windows.block_size} tokens, {len(held)} held out")
    return measure_teacher(
        frozen(session.model_of("teacher")),
        text,
        first_tokens=first_tokens_apart(session.manifest.model.topology),
        cache=home() / "surgery",
        progress=logger.info,
    )


def _stacked(windows: Windows, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the tokens of windows and, if documents are separate, their ids, each [n, T]."""
    parts = [torch.stack(part) for part in zip(*(windows[index] for index in indices), strict=True)]
    return parts[0], documents_of(tuple(parts))


def _error_block(session: Session) -> int:
    """Return the block size of the first phase that trains the student, on which block errors are measured."""
    blocks = [run.train.block_size for run in session.group.runs if run.train and run.train.trains == "student"]
    return blocks[0] if blocks else 128
