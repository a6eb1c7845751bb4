"""The stage before training: the student made from its teacher, and the statistics that this takes."""

from __future__ import annotations

import dataclasses
import time

import torch

from caramba import upcycle
from caramba.config.benchmark import PerplexityBenchmarkConfig
from caramba.config.model import ModelSpec, SurgeryConfig
from caramba.console import logger
from caramba.distill import block_errors
from caramba.experiment.ledger import StageRecord
from caramba.experiment.objectives import frozen
from caramba.experiment.session import Session
from caramba.measure import batches
from caramba.model import build_model
from caramba.result import PhaseResult
from caramba.runs.files import home

TRANSPLANT = "transplant"
ERROR_WINDOWS = 8


def transplant_student(session: Session) -> None:
    """Make the student from its teacher, once per run; the weights and the report are a stage of their own."""
    if session.student is not None:
        return
    if TRANSPLANT in session.ledger:
        session.reload(TRANSPLANT, "student")
        return
    config = session.manifest.model
    surgery = config.surgery or SurgeryConfig()
    logger.subheader(f"transplant: {surgery.method}")
    began = time.perf_counter()
    # Surgery computes in float64, which MPS does not have.
    device = torch.device("cpu") if session.device.type == "mps" else session.device
    teacher = session.model_of("teacher").to(device)
    calibration = calibrate(session, surgery) if surgery.method in upcycle.CALIBRATED else None
    spec: ModelSpec = config
    if surgery.kv_budget_bytes is not None and calibration is not None:
        spec = upcycle.fit_widths(teacher, config, calibration, surgery.kv_budget_bytes)
    student = build_model(spec, seed=session.seed_of("student")).to(device)
    report = upcycle.transplant(teacher, student, surgery, calibration)
    teacher.to(session.device)
    student.to(session.device)
    windows = session.windows("train", _error_block(session))
    batch = next(batches(windows, range(min(ERROR_WINDOWS, len(windows))), ERROR_WINDOWS))
    x, _, *documents = (part.to(session.device) for part in batch)
    errors = block_errors(teacher, upcycle.pair_attention(teacher, student), x, *documents)
    session.student = student.eval()
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


def calibrate(session: Session, surgery: SurgeryConfig) -> upcycle.Calibration:
    """Measure the teacher on windows of the train split.

    They are as long as those of the group's runs, else of its perplexity benchmarks, and at most 2048 tokens.
    The evaluation split shares no position with it. Statistics are kept under CARAMBA_HOME.
    """
    blocks = [run.train.block_size for run in session.group.runs if run.train is not None]
    blocks = blocks or [
        bench.config.block_size
        for bench in session.group.benchmarks
        if isinstance(bench.config, PerplexityBenchmarkConfig)
    ]
    windows = session.windows(
        "train", min(max(blocks, default=upcycle.LONGEST_WINDOW), upcycle.LONGEST_WINDOW)
    )
    chosen, held = upcycle.choose_windows(len(windows), windows.block_size, surgery.calibration_tokens)
    text = upcycle.CalibrationText(
        torch.stack([windows[index][0] for index in chosen]),
        torch.stack([windows[index][0] for index in held]),
    )
    logger.info(f"calibration: {len(chosen)} windows of {windows.block_size} tokens, {len(held)} held out")
    return upcycle.calibrate(
        frozen(session.model_of("teacher")), text, cache=home() / "surgery", progress=logger.info
    )


def _error_block(session: Session) -> int:
    """Return the block size of the first phase that trains the student, on which block errors are measured."""
    blocks = [
        run.train.block_size for run in session.group.runs if run.train and run.train.trains == "student"
    ]
    return blocks[0] if blocks else 128
